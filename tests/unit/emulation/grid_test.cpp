// The emulated GPU for tests of kernels: its functions, and the mistakes that it detects.
#include "tests/support/emulation/grid.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/emulation/src/device/cuda/kernel_language.h"
#include "tests/support/emulation/src/device/cuda/tensor_core.h"
#include "tests/support/emulation/src/device/cuda/warpgroup.h"

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

/// Restores the settings of the emulated GPU.
class EmulatedGpu : public testing::Test {
 protected:
  ~EmulatedGpu() override {
    set_seeds(seeds_);
    set_capability(capability_);
  }

 private:
  Seeds seeds_ = seeds();
  unsigned capability_ = capability();
};
using EmulatedGpuDeathTest = EmulatedGpu;

/// Copies a number, then puts another one in its place after the copy was awaited or before.
__global__ void overwrite_copy(const int* from, int* out, bool in_time) {
  alignas(16) __shared__ int copy[4];
  copy[0] = 1;
  device::copy_ahead(copy, from);
  device::end_copies();
  if (!in_time) copy[0] = 3;
  __syncwarp();
  device::await_copies<0>();
  if (in_time) copy[0] = 3;
  out[0] = copy[0];
}

TEST_F(EmulatedGpu, CopiesHappenBetweenStartAndWait) {
  alignas(16) const int from[4] = {2};
  const auto results = [&](bool in_time) {
    std::vector<int> found;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      set_seeds({.timing = seed});
      int out = 0;
      EXPECT_EQ(launch({.threads = 1}, &overwrite_copy, &from[0], &out, in_time), cudaSuccess);
      found.push_back(out);
    }
    return found;
  };
  EXPECT_EQ(results(true), std::vector<int>(20, 3));
  const std::vector<int> early = results(false);
  EXPECT_EQ(std::count(early.begin(), early.end(), 2) + std::count(early.begin(), early.end(), 3),
            20);
  EXPECT_GT(std::count(early.begin(), early.end(), 2), 0);
  EXPECT_GT(std::count(early.begin(), early.end(), 3), 0);
}

/// Multiplies a matrix of ones with its transpose; its first row becomes zeros after the wait or
/// before.
__global__ void multiply_early(float* out, bool in_time) {
  auto* const panel = device::dynamic_shared<Bf16>();
  for (unsigned i = threadIdx.x; i < 64 * 64; i += blockDim.x) panel[i] = to_bf16(1.0F);
  device::show_to_products();
  __syncthreads();
  float sums[8][4];
  device::start_product(sums, device::operand_by_rows(panel), device::operand_by_rows(panel),
                        false);
  device::end_products();
  if (in_time) device::await_products<0>();
  __syncthreads();
  if (threadIdx.x < 64) panel[threadIdx.x] = Bf16{0};
  __syncthreads();
  if (!in_time) device::await_products<0>();
  if (threadIdx.x == 0) out[0] = sums[0][0];
}

TEST_F(EmulatedGpu, ProductsOfWarpgroupsHappenBetweenStartAndWait) {
  set_capability(90);
  unsigned early = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    set_seeds({.timing = seed});
    const device::LaunchConfig how = {.threads = 128, .shared_bytes = 64 * 64 * sizeof(Bf16)};
    float out = -1.0F;
    EXPECT_EQ(launch(how, &multiply_early, &out, true), cudaSuccess);
    EXPECT_EQ(out, 16.0F);
    EXPECT_EQ(launch(how, &multiply_early, &out, false), cudaSuccess);
    if (out == 16.0F) ++early;
  }
  EXPECT_GT(early, 0U);
  EXPECT_LT(early, 20U);
}

__global__ void __launch_bounds__(96) bounded(float* out) {
  out[threadIdx.x] = 1.0F;
}
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 2) bounded_by_argument(float* out) {
  out[threadIdx.x] = 1.0F;
}
__global__ void unbounded(float* out) {
  out[threadIdx.x] = 1.0F;
}

/// Launches and returns the line that a refusal prints; empty if the launch succeeds.
template <class... Arguments>
std::string refusal_of(const device::LaunchConfig& how, Arguments... arguments) {
  testing::internal::CaptureStderr();
  const cudaError_t code = launch(how, arguments...);
  std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(code == cudaSuccess, line.empty());
  return line;
}
void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(EmulatedGpu, LaunchBoundsAreThoseOfTheKernel) {
  std::vector<float> out(256);
  const auto with = [](unsigned threads) { return device::LaunchConfig{.threads = threads}; };
  EXPECT_EQ(refusal_of(with(96), &bounded, out.data()), "");
  EXPECT_EQ(refusal_of(with(256), &unbounded, out.data()), "");
#if !defined(__clang__)
  expect_has(refusal_of(with(97), &bounded, out.data()), "bounded(float*): blocks of 97 threads");
  EXPECT_EQ(refusal_of(with(64), &bounded_by_argument<2>, out.data()), "");
  expect_has(refusal_of(with(128), &bounded_by_argument<2>, out.data()),
             "bounded_by_argument<2>(float*): blocks of 128 threads; its launch bounds allow 64");
#endif
}

TEST_F(EmulatedGpu, SharedMemoryIsThatOfTheGpu) {
  std::vector<float> out(32);
  const auto with = [](std::size_t kibibytes) {
    return device::LaunchConfig{.threads = 32, .shared_bytes = kibibytes << 10U};
  };
  for (const auto& [gpu, most] :
       {std::pair(75U, 64U), {80U, 163U}, {86U, 99U}, {89U, 99U}, {90U, 227U}}) {
    set_capability(gpu);
    EXPECT_EQ(refusal_of(with(most), &unbounded, out.data()), "") << gpu;
    expect_has(
        refusal_of(with(most + 1), &unbounded, out.data()),
        "unbounded(float*): " + std::to_string((most + 1) << 10U) + " bytes of shared memory");
  }
}

struct Large {
  char bytes[4090];
};
__global__ void take(Large large, int* out) {
  *out = large.bytes[0];
}
__global__ void take_none() {}

TEST_F(EmulatedGpu, GridsAndArgumentsHaveLimits) {
  int out = 0;
  expect_has(refusal_of({}, &take, Large(), &out), "take(");
  EXPECT_EQ(refusal_of({.blocks = {1, 3, 65535}}, &take_none), "");
  expect_has(refusal_of({.blocks = {1, 1, 65536}}, &take_none),
             "take_none(): a grid of 1 x 1 x 65536 blocks");
  expect_has(refusal_of({.blocks = {1, 65536}}, &take_none), "take_none()");
}

/// Some lanes end before an instruction of the whole warp.
__global__ void multiply_alone(const Bf16* rows, float* out) {
  if (threadIdx.x == 5) return;
  std::uint32_t a[4];
  device::load_matrices(a, rows);
  float sums[4] = {};
  device::multiply_add(sums, a, {a[0], a[1]});
  out[threadIdx.x] = sums[0];
}

TEST_F(EmulatedGpuDeathTest, LanesThatEndedBeforeAnInstructionOfTheWarpAreReported) {
  alignas(16) const Bf16 rows[8] = {};
  std::vector<float> out(32);
  EXPECT_DEATH(launch({.threads = 32}, &multiply_alone, &rows[0], out.data()),
               "multiply_alone.*lane 5, which has ended");
}

/// The last warp of a warpgroup ends, or leaves out a product.
__global__ void multiply_without_warp(bool ends) {
  auto* const panel = device::dynamic_shared<Bf16>();
  float sums[8][4] = {};
  const bool last = threadIdx.x / 32 == 3;
  if (last && ends) return;
  __syncthreads();
  if (!last) {
    device::start_product(sums, device::operand_by_rows(panel), device::operand_by_rows(panel),
                          false);
  }
  device::end_products();
  device::await_products<0>();
}

TEST_F(EmulatedGpuDeathTest, WarpsThatMissAProductOfTheirWarpgroupAreReported) {
  set_capability(90);
  const device::LaunchConfig how = {.threads = 128, .shared_bytes = 64 * 64 * sizeof(Bf16)};
  for (const bool ends : {true, false}) {
    EXPECT_DEATH(launch(how, &multiply_without_warp, ends),
                 "multiply_without_warp.*threads 0 and 96 do not both take part");
  }
}

TEST_F(EmulatedGpuDeathTest, InstructionsOfNewerGpusAreReported) {
  alignas(16) const int from[4] = {};
  int out = 0;
  set_capability(75);
  EXPECT_DEATH(launch({.threads = 1}, &overwrite_copy, &from[0], &out, true),
               "overwrite_copy.*compute capability 7.5 does not have");
}

__global__ void compute_powers(const float* x, float* y, int function) {
  const float value = x[threadIdx.x];
  y[threadIdx.x] = function == 0   ? device::power_of_two(value)
                   : function == 1 ? __expf(value)
                   : function == 2 ? __fdividef(1.0F, value)
                                   : std::exp(value);
}

/// Results within their documented errors, which differ from the host's and from seed to seed, but
/// not from call to call.
TEST_F(EmulatedGpu, ApproximateFunctionsHaveErrors) {
  std::vector<float> x(512);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.02F * static_cast<float>(i) - 5.01F;
  for (const int function : {0, 1, 2, 3}) {
    const auto results = [&](std::uint64_t seed) {
      set_seeds({.arithmetic = seed});
      std::vector<float> y(x.size());
      EXPECT_EQ(launch({.threads = 512}, &compute_powers, x.data(), y.data(), function),
                cudaSuccess);
      return y;
    };
    const std::vector<float> host = results(0);
    EXPECT_EQ(results(1), results(1));
    EXPECT_NE(results(1), results(2));
    double largest = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double error = std::abs(results(1)[i] / static_cast<double>(host[i]) - 1.0);
      largest = std::max(largest, error * 0x1p23);
      const double ulps = function == 1 ? 3.0 + std::floor(1.173 * std::abs(x[i])) : 3.0;
      EXPECT_LE(error * 0x1p23, ulps) << function << ": " << x[i];
    }
    EXPECT_GT(largest, 1.0) << function;
  }
}

/// A sum whose value shows the order and rounding: 2^24 + 1 is not an fp32 number.
__global__ void multiply_once(const Bf16* a, const Bf16* b, float* c) {
  std::uint32_t fa[4];
  device::load_matrices(fa, a + threadIdx.x % 16 * 16 + threadIdx.x / 16 * 8);
  std::uint32_t fb[4];
  device::load_matrices_transposed(fb, b + threadIdx.x % 16 * 8);
  float sums[4] = {};
  device::multiply_add(sums, fa, {fb[0], fb[1]});
  if (threadIdx.x == 0) *c = sums[0];
}

TEST_F(EmulatedGpu, TensorCoresAddInAnyOrder) {
  alignas(16) Bf16 a[256] = {};
  alignas(16) Bf16 b[128] = {};
  for (std::size_t k = 0; k < 16; ++k) {
    a[k] = to_bf16(k == 0 ? 0x1p24F : 1.0F);
    b[8 * k] = to_bf16(1.0F);
  }
  std::vector<float> found;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    set_seeds({.arithmetic = seed});
    float sum = 0.0F;
    EXPECT_EQ(launch({.threads = 32}, &multiply_once, &a[0], &b[0], &sum), cudaSuccess);
    EXPECT_GE(sum, 0x1p24F);
    EXPECT_LE(sum, 0x1p24F + 16.0F);
    found.push_back(sum);
  }
  std::sort(found.begin(), found.end());
  EXPECT_NE(found.front(), found.back());
}

}  // namespace
}  // namespace ballast::test::emulation::grid_test
