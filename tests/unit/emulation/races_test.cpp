// Faults of kernels that the emulated GPU reports if it watches their accesses: each kernel here
// has one, and the same kernel without it is not reported.
#include "tests/support/emulation/races.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "tests/support/emulation/grid.h"
#include "tests/support/emulation/src/device/cuda/kernel_language.h"
#include "tests/support/emulation/src/device/cuda/tensor_core.h"
#include "tests/support/emulation/src/device/cuda/warpgroup.h"
#include "tests/support/tags.h"

namespace ballast::test::emulation::races_test {
namespace {

using device::launch;

/// All tests of this program are watched.
const bool kWatched = (watch_races(), true);

__global__ void pass_on(int* out, bool with_barrier) {
  __shared__ int passed[64];
  passed[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = passed[63 - threadIdx.x];
}

TAG_TESTS("small_shapes", "RacesDeathTest.*");
TEST(RacesDeathTest, AMissingBarrierIsReported) {
  std::vector<int> out(64);
  EXPECT_EQ(launch({.threads = 64}, &pass_on, out.data(), true), cudaSuccess);
  EXPECT_DEATH(launch({.threads = 64}, &pass_on, out.data(), false),
               "pass_on.*race: .* static shared memory, which thread .* since their last barrier");
}

/// Lanes read what others write later.
__global__ void overwrite(int* out, bool with_barrier) {
  int* const passed = device::dynamic_shared<int>();
  passed[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = passed[7];
  if (with_barrier) __syncthreads();
  if (threadIdx.x == 40) passed[7] = 2;
}

TEST(RacesDeathTest, AWriteOfWhatOthersStillReadIsReported) {
  std::vector<int> out(64);
  const device::LaunchConfig how = {.threads = 64, .shared_bytes = 256};
  EXPECT_EQ(launch(how, &overwrite, out.data(), true), cudaSuccess);
  EXPECT_DEATH(launch(how, &overwrite, out.data(), false),
               "overwrite.*thread 40: race: writes byte 28 of dynamic shared memory, which thread "
               ".* and others have read");
}

__global__ void pass_in_warp(int* out, bool with_barrier) {
  __shared__ int passed[32];
  passed[threadIdx.x] = 1;
  if (with_barrier) {
    __syncwarp();
  } else {
    __shfl_sync(device::kAllLanes, 0, 0);
  }
  out[threadIdx.x] = passed[31 - threadIdx.x];
}

TEST(RacesDeathTest, AShuffleInPlaceOfABarrierOfTheWarpIsReported) {
  std::vector<int> out(32);
  EXPECT_EQ(launch({.threads = 32}, &pass_in_warp, out.data(), true), cudaSuccess);
  EXPECT_DEATH(launch({.threads = 32}, &pass_in_warp, out.data(), false), "pass_in_warp.*race");
}

/// Neighbouring bytes, or one word.
__global__ void write_together(std::uint8_t* bytes, unsigned step) {
  if (threadIdx.x == 0) bytes[blockIdx.x * step] = static_cast<std::uint8_t>(blockIdx.x);
}

TEST(RacesDeathTest, TwoBlocksThatWriteOneByteAreReported) {
  std::vector<std::uint8_t> bytes(8);
  const device::LaunchConfig how = {.blocks = 8, .threads = 32};
  EXPECT_EQ(launch(how, &write_together, bytes.data(), 1U), cudaSuccess);
  EXPECT_DEATH(launch(how, &write_together, bytes.data(), 0U),
               "write_together.*race: writes global memory at .*another block of the grid");
}

__global__ void add_up(unsigned* least, bool atomically) {
  if (threadIdx.x > 0) return;
  if (atomically) {
    atomicMin(least, blockIdx.x);
  } else if (*least > blockIdx.x) {
    *least = blockIdx.x;
  }
}

TEST(RacesDeathTest, AtomicFunctionsDoNotRace) {
  unsigned least = 100;
  const device::LaunchConfig how = {.blocks = 8, .threads = 32};
  EXPECT_EQ(launch(how, &add_up, &least, true), cudaSuccess);
  EXPECT_EQ(least, 0U);
  least = 100;
  EXPECT_DEATH(launch(how, &add_up, &least, false), "add_up.*race");
}

/// Copies one word to each thread and reads the neighbour's.
__global__ void copy_early(const int* from, int* out, bool in_time) {
  int* const copies = device::dynamic_shared<int>();
  device::copy_ahead(copies + 4 * threadIdx.x, from + 4 * threadIdx.x);
  device::end_copies();
  if (in_time) device::await_copies<0>();
  __syncthreads();
  out[threadIdx.x] = copies[4 * (31 - threadIdx.x)];
  if (!in_time) device::await_copies<0>();
}

TEST(RacesDeathTest, AnAccessToACopyThatIsNotAwaitedIsReported) {
  alignas(16) const int from[128] = {};
  std::vector<int> out(32);
  const device::LaunchConfig how = {.threads = 32, .shared_bytes = 512};
  EXPECT_EQ(launch(how, &copy_early, &from[0], out.data(), true), cudaSuccess);
  EXPECT_DEATH(launch(how, &copy_early, &from[0], out.data(), false),
               "copy_early.*an asynchronous copy of thread .* that is not awaited");
}

/// Multiplies two matrices of zeros by a warpgroup.
__global__ void multiply_panels(float* out, bool shown, bool awaited) {
  auto* const panel = device::dynamic_shared<Bf16>();
  for (unsigned i = threadIdx.x; i < 64 * 64; i += blockDim.x) panel[i] = Bf16{0};
  if (shown) device::show_to_products();
  __syncthreads();
  float sums[8][4];
  device::begin_products();
  device::start_product(sums, device::operand_by_rows(panel), device::operand_by_rows(panel),
                        false);
  device::end_products();
  if (awaited) device::await_products<0>();
  __syncthreads();
  panel[threadIdx.x] = Bf16{1};
  if (!awaited) device::await_products<0>();
  out[threadIdx.x] = sums[0][0];
}

TEST(RacesDeathTest, PanelsThatProductsStillReadOrDoNotSeeAreReported) {
  set_warpgroup_products(true);
  std::vector<float> out(128);
  const device::LaunchConfig how = {.threads = 128, .shared_bytes = 64 * 64 * sizeof(Bf16)};
  EXPECT_EQ(launch(how, &multiply_panels, out.data(), true, true), cudaSuccess);
  EXPECT_DEATH(launch(how, &multiply_panels, out.data(), false, true),
               "multiply_panels.*written and not shown to products");
  // Which access comes first depends on the alignment of the panel.
  EXPECT_DEATH(
      launch(how, &multiply_panels, out.data(), true, false),
      "multiply_panels.*race: .* byte .* of dynamic shared memory, which thread .* "
      "((has|and others have) read|has written after a barrier before the start of the product)");
  set_warpgroup_products(false);
}

__global__ void fill_static(int* out) {
  __shared__ int filled[8192];
  for (unsigned i = threadIdx.x; i < 8192; i += blockDim.x) filled[i] = 1;
  __syncthreads();
  out[threadIdx.x] = filled[64 - threadIdx.x];
}

TEST(RacesDeathTest, StaticMemoryCountsTowardsTheLimit) {
  const auto how = [](std::size_t kibibytes) {
    return device::LaunchConfig{.threads = 32, .shared_bytes = kibibytes << 10U};
  };
  std::vector<int> out(32);
  EXPECT_EQ(launch(how(67), &fill_static, out.data()), cudaSuccess);
  EXPECT_DEATH(launch(how(68), &fill_static, out.data()), "fill_static.*static memory included");
}

}  // namespace
}  // namespace ballast::test::emulation::races_test
