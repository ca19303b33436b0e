// The memory of checks of tokens, on a fake of the CUDA runtime.
#include <array>
#include <cstdint>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/plan/executor.h"

#include "src/model/cuda/work_check.h"
#include "tests/support/fake_cuda.h"

namespace ballast::model::cuda::token_check_test {
namespace {

using test::FakeCuda;

static_assert(TokenCheck::kMaxChecks > plan::kMaxOnFastStream);

TEST(TokenCheckMemory, IsAllocatedByTheFirstCheckForAllThatCanBeInFlight) {
  const auto device = device::make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  device::CudaStream& cuda = device::as_cuda(*stream);
  const int before = FakeCuda::host_allocations;
  {
    std::uint32_t first_bad = 0;
    TokenCheck check;
    check.set_memory(&first_bad);
    const std::array<std::int32_t, 3> good = {0, 4, 6};
    check.enqueue(cuda, good.data(), good.size(), 0, 7);
    stream->synchronize();
    const FakeCuda::NoAllocation in_steps;
    const int refused = FakeCuda::NoAllocation::refused;
    const std::array<std::int32_t, 3> bad = {0, 4, 7};
    for (int round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i + 1 < TokenCheck::kMaxChecks; ++i) {
        check.enqueue(cuda, good.data(), good.size(), 0, 7);
      }
      check.enqueue(cuda, bad.data(), bad.size(), 0, 7);
      EXPECT_THROW(stream->synchronize(), Error) << "a result was overwritten";
    }
    EXPECT_EQ(FakeCuda::NoAllocation::refused, refused);
  }
  EXPECT_EQ(FakeCuda::host_allocations, before) << "memory was not freed";
}

}  // namespace
}  // namespace ballast::model::cuda::token_check_test
