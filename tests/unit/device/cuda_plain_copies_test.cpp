// The baseline for copies of the CUDA device, on a fake of the CUDA runtime.
#include <gtest/gtest.h>

#include "ballast/device/device.h"

#include "tests/support/fake_cuda.h"

namespace ballast::device::cuda_plain_copies_test {
namespace {

using test::FakeCuda;

TEST(CudaPlainCopies, RunInTheGivenDirectionTheGivenNumberOfTimes) {
  constexpr Bytes kSize = 100 * kKiB + 1;
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  {
    const auto copies = make_plain_copies(*device, kSize);
    EXPECT_EQ(FakeCuda::host_allocations, 2);
    FakeCuda::copied_to_device = 0;
    FakeCuda::copied_to_host = 0;
    copies->run(CopyWay::up, 3);
    EXPECT_EQ(FakeCuda::copied_to_device, 3 * kSize);
    EXPECT_EQ(FakeCuda::copied_to_host, 0U);
    copies->run(CopyWay::down, 2);
    EXPECT_EQ(FakeCuda::copied_to_device, 3 * kSize);
    EXPECT_EQ(FakeCuda::copied_to_host, 2 * kSize);
    copies->run(CopyWay::both, 4);
    EXPECT_EQ(FakeCuda::copied_to_device, 7 * kSize);
    EXPECT_EQ(FakeCuda::copied_to_host, 6 * kSize);
    EXPECT_TRUE(FakeCuda::registered().empty());
  }
  EXPECT_EQ(FakeCuda::host_allocations, 0);
  EXPECT_EQ(device->allocated(), 0U);
}

TEST(GpuName, IsThatOfItsKindAndSize) {
  EXPECT_EQ(gpu_name({.kind = "cuda"}), "Fake GPU, 8.00 GiB");
}

}  // namespace
}  // namespace ballast::device::cuda_plain_copies_test
