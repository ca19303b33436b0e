// Needs CUDA's libraries, but no driver and no GPU.
#include <string>

#include <gtest/gtest.h>

#include "src/device/cuda/errors.h"

namespace ballast::device {
namespace {

TEST(CheckCuda, NamesTheOperationAndForgetsTheFailure) {
  EXPECT_NO_THROW(check_cuda(cudaSuccess, "nothing"));
  const cudaError_t code = cudaSetDevice(100000);  // no such device, or no driver to ask
  ASSERT_NE(code, cudaSuccess);
  ASSERT_EQ(cudaPeekAtLastError(), code);
  try {
    check_cuda(code, "taking CUDA device 100000");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    const std::string text = error.what();
    EXPECT_EQ(text.find("taking CUDA device 100000: CUDA: "), 0U) << text;
    EXPECT_NE(text.find(cudaGetErrorName(code)), std::string::npos) << text;
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST(CudaEnd, IsSilentAboutFailures) {
  // No driver here, or nothing of CUDA's there: neither can be freed.
  static int not_of_cuda = 0;
  CudaEnd<cudaFree>()(static_cast<void*>(&not_of_cuda));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
}  // namespace ballast::device
