// Operations that collectives enqueue while the compute lane enqueues a pass, on a fake of CUDA.
#include <vector>

#include <gtest/gtest.h>

#include "ballast/device/device.h"

#include "src/model/cuda/ops.h"
#include "tests/support/fake_cuda.h"

namespace ballast::model::cuda::other_streams_test {
namespace {

using test::FakeCuda;

/// A GPU whose work runs only when somebody waits for its stream.
class LateGpu : public testing::Test {
 protected:
  LateGpu() { FakeCuda::seed = 5; }
  ~LateGpu() override { FakeCuda::seed = before_; }

 private:
  std::uint64_t before_ = FakeCuda::seed;
};

TEST_F(LateGpu, ZeroingForAReductionDoesNotMoveTheKernelsOfAPass) {
  const auto device = device::make_device({.kind = "cuda", .budget = 16 * kPage});
  const auto compute = device->make_stream("compute");
  const auto collectives = device->make_stream("collectives");
  const DeviceBytes reduced = device->allocate(kPage, "reduced");
  const DeviceBytes passed = device->allocate(kPage, "passed");
  const std::vector<std::byte> ones(kPage, std::byte{1});
  const auto first_of = [&](DeviceBytes memory) {
    std::vector<std::byte> found(kPage);
    device->copy_to_host(*compute, found, memory);
    compute->synchronize();
    return found.front();
  };
  for (const DeviceBytes memory : {reduced, passed}) {
    device->copy_to_device(*compute, memory, ones);
  }
  compute->synchronize();
  const DeviceOps<float> ops = make_ops<float>({.heads = {{}}}, {});
  ops.queue->run(*compute, [&] {
    ops.packing->zero(*collectives, view_as<float>(reduced).raw(), kPage / sizeof(float));
    ops.elementwise->zero(view_as<float>(passed).raw(), kPage / sizeof(float));
  });
  EXPECT_EQ(first_of(passed), std::byte{0}) << "not on the stream of the pass";
  EXPECT_EQ(first_of(reduced), std::byte{1}) << "not on the stream of the reduction";
  collectives->synchronize();
  EXPECT_EQ(first_of(reduced), std::byte{0});
}

}  // namespace
}  // namespace ballast::model::cuda::other_streams_test
