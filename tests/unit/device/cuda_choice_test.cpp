// Tests which device "auto" selects, on a fake of the CUDA runtime with several GPUs. Facts about a
// local rank's GPU are cached, so each test uses a different rank.
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/device/cuda/connections.h"
#include "tests/support/captured_log.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/variable.h"

namespace ballast::device::cuda_choice_test {
namespace {

using test::FakeCuda;

DeviceOptions options_of(const std::string& kind, std::uint32_t local_rank) {
  return {.kind = kind, .budget = kMiB, .local_rank = local_rank};
}

TEST(AutoDevice, IsAUsableGpu) {
  const DeviceOptions options = options_of("auto", 0);
  EXPECT_EQ(gpu_refusal(options), "");
  EXPECT_EQ(kind_of(options), "cuda");
  EXPECT_FALSE(shares_host_cores(options));
  EXPECT_GT(own_memory(options), 0U);
  EXPECT_EQ(gpu_name(options), "Fake GPU, 8.00 GiB");
  EXPECT_EQ(make_device(options)->kind(), "cuda");
}

TEST(CudaConnections, AreRaisedBeforeTheFirstCallUnlessTheUserSetsThem) {
  make_device(options_of("cuda", 0));
  EXPECT_EQ(FakeCuda::connections_at_start(), "32");
  const test::Variable users("CUDA_DEVICE_MAX_CONNECTIONS", "16");
  raise_connections();
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "16");
}

TEST(AutoDevice, IsNotAGpuWithoutBf16ForTrainingInIt) {
  FakeCuda::old_gpu = 2;
  const DeviceOptions options = options_of("auto", 2);
  const std::string reason =
      "CUDA device 2, Fake GPU, has compute capability 7.5 and so no bf16; enable fp16 instead "
      "(fp16.enabled) to train on it";
  EXPECT_EQ(gpu_refusal(options), reason);
  EXPECT_EQ(kind_of(options), "host");
  EXPECT_EQ(own_memory(options), 0U);
  EXPECT_EQ(make_device(options)->kind(), "host");
  try {
    make_device(options_of("cuda", 2));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    EXPECT_EQ(error.what(), reason + ", or set ballast.device to \"host\"");
  }
  for (const DType type : {DType::f16, DType::f32}) {
    DeviceOptions other = options;
    other.type = type;
    EXPECT_EQ(gpu_refusal(other), "");
    EXPECT_EQ(make_device(other)->kind(), "cuda");
  }
  FakeCuda::old_gpu = -1;
}

TEST(AutoDevice, IsNotAGpuWithoutALibraryThatItNeeds) {
  FakeCuda::missing_library = "libcublasLt.so cannot be loaded";
  EXPECT_EQ(gpu_refusal(options_of("auto", 3)), FakeCuda::missing_library);
  EXPECT_EQ(kind_of(options_of("auto", 3)), "host");
  FakeCuda::missing_library.clear();
}

}  // namespace
}  // namespace ballast::device::cuda_choice_test
