// The emulated GPU for tests of kernels: its functions, and the mistakes that it detects.
#include "tests/support/emulation/grid.h"

#include <algorithm>
#include <bit>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/emulation/src/device/cuda/kernel_language.h"
#include "tests/support/emulation/src/device/cuda/tensor_core.h"

namespace ballast::test::emulation::grid_test {
namespace {

using device::kAllLanes;
using device::launch;

constexpr Order kOrders[] = {Order::forward, Order::backward, Order::shuffled};

__global__ void reverse(const int* in, int* out, bool with_barrier) {
  int* const shared = device::dynamic_shared<int>();
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = in[at];
  if (with_barrier) __syncthreads();
  out[at] = shared[blockDim.x - 1 - threadIdx.x];
}

std::vector<int> reversed(Order order, bool with_barrier) {
  set_order(order);
  std::vector<int> in(200);
  for (int i = 0; i < 200; ++i) in[static_cast<std::size_t>(i)] = i;
  std::vector<int> out(200);
  EXPECT_EQ(launch({.blocks = 2, .threads = 100, .shared_bytes = 100 * sizeof(int)}, &reverse,
                   in.data(), out.data(), with_barrier),
            cudaSuccess);
  return out;
}

TEST(Grid, BarriersMakeTheOrderOfThreadsIrrelevantAndTheirAbsenceShows) {
  std::vector<int> expected(200);
  for (int i = 0; i < 200; ++i) expected[static_cast<std::size_t>(i)] = i < 100 ? 99 - i : 299 - i;
  for (const Order order : kOrders) {
    EXPECT_EQ(reversed(order, true), expected);
    EXPECT_NE(reversed(order, false), expected);
  }
}

__global__ void sum_lanes(const float* in, float* out) {
  float value = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  out[threadIdx.x] = value + __shfl_sync(kAllLanes, in[threadIdx.x], 3);
  if (__ballot_sync(kAllLanes, threadIdx.x % 2 == 1) != 0xaaaaaaaaU) out[threadIdx.x] = -1.0F;
}

TEST(Grid, LanesExchangeWhatTheyHave) {
  std::vector<float> in(64);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  for (const Order order : kOrders) {
    set_order(order);
    std::vector<float> out(64);
    EXPECT_EQ(launch({.threads = 64}, &sum_lanes, in.data(), out.data()), cudaSuccess);
    for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], i < 32 ? 496.0F + 3 : 1520.0F + 35) << i;
  }
}

/// Each block's number, at the index of its turn.
__global__ void queue_up(unsigned* queue) {
  const unsigned place = queue[0]++;
  queue[1 + place] = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

TEST(Grid, BlocksRunInTheOrderTooAndEachOnce) {
  std::vector<unsigned> forward(25);
  for (unsigned i = 0; i < 24; ++i) forward[1 + i] = i;
  forward[0] = 24;
  for (const Order order : kOrders) {
    set_order(order);
    std::vector<unsigned> queue(25);
    EXPECT_EQ(launch({.blocks = {2, 3, 4}}, &queue_up, queue.data()), cudaSuccess);
    if (order == Order::backward) std::reverse(queue.begin() + 1, queue.end());
    if (order == Order::shuffled) {
      EXPECT_NE(queue, forward);
      std::sort(queue.begin() + 1, queue.end());
    }
    EXPECT_EQ(queue, forward);
  }
}

/// Each warp passes a number to the other one, twice, through the same memory.
__global__ void tell_twice(int* out, bool with_barrier) {
  __shared__ int told[2];
  const unsigned warp = threadIdx.x / 32;
  int heard = 0;
  for (int turn = 1; turn <= 2; ++turn) {
    if (threadIdx.x % 32 == 0) told[warp] = turn;
    __syncthreads();
    heard = 10 * heard + told[1 - warp];
    if (with_barrier) __syncthreads();
    __syncwarp();
  }
  out[threadIdx.x] = heard;
}

TEST(Grid, WarpsThatRunAheadShow) {
  for (const Order order : kOrders) {
    for (const bool with_barrier : {true, false}) {
      set_order(order);
      std::vector<int> out(64);
      EXPECT_EQ(launch({.threads = 64}, &tell_twice, out.data(), with_barrier), cudaSuccess);
      const std::vector<int> right(64, 12);
      if (with_barrier) {
        EXPECT_EQ(out, right);
      } else if (order != Order::shuffled) {  // shuffled: either result is possible
        EXPECT_NE(out, right);
      }
    }
  }
}

__global__ void wait_alone() {
  if (threadIdx.x == 3) __syncwarp();
  if (threadIdx.x != 3) __syncthreads();
}

TEST(GridDeathTest, ReportsABarrierThatSomeThreadsNeverReach) {
  EXPECT_DEATH(launch({.threads = 32}, &wait_alone), "wait for each other for ever");
}

/// C = A B with A [16, 16] and B [16, 8], through shared memory and fragments.
__global__ void multiply(const Bf16* a, const Bf16* b, float* c) {
  alignas(16) __shared__ Bf16 tile_a[16 * 16];
  alignas(16) __shared__ Bf16 tile_b[16 * 8];
  const unsigned lane = threadIdx.x;
  device::copy_ahead(tile_a + 8 * lane, a + 8 * lane);
  device::copy_ahead(tile_b + 8 * (lane % 16), b + 8 * (lane % 16));
  device::end_copies();
  device::await_copies<0>();
  __syncthreads();
  std::uint32_t fa[4];
  device::load_matrices(fa, tile_a + lane % 16 * 16 + lane / 16 * 8);
  std::uint32_t fb[4];
  device::load_matrices_transposed(fb, tile_b + lane % 16 * 8);
  float sums[4] = {};
  device::multiply_add(sums, fa, {fb[0], fb[1]});
  const unsigned row = lane / 4;
  const unsigned column = 2 * (lane % 4);
  for (unsigned i = 0; i < 4; ++i) c[(row + 8 * (i / 2)) * 8 + column + i % 2] = sums[i];
}

TEST(Grid, TensorCoresMultiplyWhatFragmentsHold) {
  std::vector<Bf16> a(256);
  std::vector<Bf16> b(128);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = to_bf16(static_cast<float>(i % 37) - 11.0F);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = to_bf16(static_cast<float>(i % 23) - 5.0F);
  for (const Order order : kOrders) {
    set_order(order);
    std::vector<float> c(128);
    EXPECT_EQ(launch({.threads = 32}, &multiply, a.data(), b.data(), c.data()), cudaSuccess);
    for (std::size_t row = 0; row < 16; ++row) {
      for (std::size_t column = 0; column < 8; ++column) {
        float expected = 0.0F;
        for (std::size_t k = 0; k < 16; ++k) {
          expected += to_float(a[row * 16 + k]) * to_float(b[k * 8 + column]);
        }
        EXPECT_EQ(c[row * 8 + column], expected) << row << ", " << column;
      }
    }
  }
}

__global__ void start_only(const float* from) {
  alignas(16) __shared__ float to[4];
  device::copy_ahead(to, from);
  device::end_copies();
}

TEST(GridDeathTest, CopiesWithoutAWaitAreReported) {
  alignas(16) const float from[4] = {};
  EXPECT_DEATH(launch({.threads = 1}, &start_only, &from[0]), "copies that nobody waits for");
}

}  // namespace
}  // namespace ballast::test::emulation::grid_test
