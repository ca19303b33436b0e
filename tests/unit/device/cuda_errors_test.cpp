// Needs CUDA's libraries, but no driver and no GPU.
#include <string>

#include <gtest/gtest.h>

#include "src/device/cuda/runtime.h"

namespace ballast::device::cuda_errors_test {
namespace {

TEST(CheckCuda, NamesTheOperationAndTheError) {
  EXPECT_NO_THROW(check_cuda(cudaSuccess, "nothing"));
  const cudaError_t code = cudaSetDevice(100000);  // no such device, or no driver
  ASSERT_NE(code, cudaSuccess);
  try {
    check_cuda(code, "taking CUDA device 100000");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    const std::string text = error.what();
    EXPECT_EQ(text.find("taking CUDA device 100000: CUDA: "), 0U) << text;
    EXPECT_NE(text.find(cudaGetErrorName(code)), std::string::npos) << text;
  }
}

TEST(CheckCuda, SaysHowToFindTheKernelThatFailed) {
  const auto text_of = [](cudaError_t code) -> std::string {
    try {
      check_cuda(code, "work before an event");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string advice =
      "; a kernel of this or another operation failed: to find it, repeat with "
      "ballast.gpu_checks=each";
  for (const cudaError_t code : {cudaErrorIllegalAddress, cudaErrorMisalignedAddress,
                                 cudaErrorLaunchFailure, cudaErrorIllegalInstruction}) {
    EXPECT_TRUE(text_of(code).ends_with(advice)) << text_of(code);
  }
  const WorkIsAwaited awaited;
  EXPECT_TRUE(text_of(cudaErrorIllegalAddress).ends_with(")")) << text_of(cudaErrorIllegalAddress);
  for (const cudaError_t code : {cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
    EXPECT_EQ(text_of(code).find(advice), std::string::npos) << text_of(code);
  }
}

}  // namespace
}  // namespace ballast::device::cuda_errors_test
