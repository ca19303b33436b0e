// Packing and measuring of gradients on a GPU.
#include "src/model/cuda/rows/gradients.h"

#include <limits>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::gradients_test {
namespace {

using test::DeviceArray;
using test::exact;
using test::in_every_order;
using test::must;
using test::rounded;

class CudaGradients : public test::Kernels {};

template <class T>
struct Packed {
  std::vector<T> values;
  GradientStats stats;
  GradientStats measured;  ///< statistics of the packed values alone
};

std::size_t chunks_of(std::size_t size) {
  return (size + kStatsChunk - 1) / kStatsChunk;
}

/// Eight elements after the packed ones must not change.
template <class T>
Packed<T> pack(const std::vector<float>& gradient, const std::vector<float>& tied) {
  const std::size_t size = gradient.size();
  const DeviceArray<float> from(gradient);
  const DeviceArray<float> more(tied);
  const DeviceArray<GradientStats> partial(chunks_of(size), {-1.0, 5});
  const auto found = in_every_order([&] {
    const DeviceArray<T> packed(size + 8, rounded<T>(3.0));
    const DeviceArray<GradientStats> stats(2, {-1.0, 7});
    must(pack_gradient<T>(nullptr, from.data(), tied.empty() ? nullptr : more.data(), tied.size(),
                          packed.data(), size, partial.data(), stats.data()));
    must(measure_gradient<T>(nullptr, packed.data(), size, partial.data(), stats.data() + 1));
    return std::tuple{packed.get(), stats.get()};
  });
  Packed<T> all = {std::get<0>(found), std::get<1>(found)[0], std::get<1>(found)[1]};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(all.values.back(), rounded<T>(3.0));
    all.values.pop_back();
  }
  return all;
}

template <class T>
void check(std::size_t size, std::size_t tied_size) {
  SCOPED_TRACE(testing::Message() << size << " elements, " << tied_size << " of them tied");
  const std::vector<float> gradient = test::normals<float>(size, 1);
  const std::vector<float> tied = test::normals<float>(tied_size, 2);
  const Packed<T> found = pack<T>(gradient, tied);
  double squares = 0.0;
  for (std::size_t i = 0; i < size; ++i) {
    const float sum = i < tied_size ? gradient[i] + tied[i] : gradient[i];
    ASSERT_EQ(found.values[i], rounded<T>(sum)) << i;
    squares += exact(found.values[i]) * exact(found.values[i]);
  }
  EXPECT_NEAR(found.stats.sum_of_squares, squares, 1e-12 * squares);
  EXPECT_EQ(found.stats.non_finite, 0U);
  EXPECT_EQ(found.measured.sum_of_squares, found.stats.sum_of_squares);
  EXPECT_EQ(found.measured.non_finite, 0U);
}

TEST_F(CudaGradients, ArePackedAndMeasured) {
  // Sizes below a thread's eight elements, below a chunk, exactly one chunk, and above it; the tied
  // part ends within eight elements, within a chunk, and with the last element.
  for (const auto& [size, tied] : {std::pair<std::size_t, std::size_t>{1, 0},
                                   {5, 3},
                                   {1024, 1024},
                                   {8200, 4099},
                                   {kStatsChunk, kStatsChunk - 8},
                                   {kStatsChunk + 13, kStatsChunk + 13},
                                   {3 * kStatsChunk - 4, kStatsChunk + 20}}) {
    check<float>(size, tied);
    check<Bf16>(size, tied);
  }
}

TEST_F(CudaGradients, OfMoreChunksThanThreadsAddThemUp) {
  // The last kernel has 128 threads.
  const std::size_t size = 129 * kStatsChunk + 8;
  const DeviceArray<Bf16> packed(size, to_bf16(0.5F));
  const DeviceArray<GradientStats> partial(chunks_of(size));
  const DeviceArray<GradientStats> stats(1);
  must(measure_gradient<Bf16>(nullptr, packed.data(), size, partial.data(), stats.data()));
  EXPECT_EQ(stats.get()[0].sum_of_squares, 0.25 * static_cast<double>(size));
}

template <class T>
void check_non_finite() {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> gradient(kStatsChunk + 100, 1.0F);
  std::vector<float> tied(50, 0.0F);
  gradient[3] = infinity;
  gradient[4] = -infinity;
  gradient[kStatsChunk + 99] = nan;
  gradient[7] = 3e38F;
  tied[7] = 3e38F;                                   // their sum overflows
  gradient[20] = std::numeric_limits<float>::max();  // rounds to infinity in bf16
  const Packed<T> found = pack<T>(gradient, tied);
  const std::uint64_t expected = std::is_same_v<T, Bf16> ? 5 : 4;
  EXPECT_EQ(found.stats.non_finite, expected);
  EXPECT_EQ(found.measured.non_finite, expected);
  EXPECT_TRUE(std::isnan(found.stats.sum_of_squares));
  EXPECT_TRUE(std::isnan(exact(found.values.back())));
  EXPECT_EQ(exact(found.values[4]), -std::numeric_limits<double>::infinity());
}
TEST_F(CudaGradients, OfInfAndNanAreCounted) {
  check_non_finite<float>();
  check_non_finite<Bf16>();
}

TEST_F(CudaGradients, LargeOnesDoNotOverflowTheSum) {
  const Packed<float> found = pack<float>(std::vector<float>(16, 1e30F), {});
  const auto value = static_cast<double>(1e30F);
  EXPECT_EQ(found.stats.sum_of_squares, 16 * value * value);
}

TEST_F(CudaGradients, ArePackedWithoutStatistics) {
  const DeviceArray<float> gradient(20, 1.5F);
  const DeviceArray<Bf16> packed(20);
  must(pack_gradient<Bf16>(nullptr, gradient.data(), nullptr, 0, packed.data(), 20, nullptr,
                           nullptr));
  EXPECT_EQ(packed.get(), std::vector<Bf16>(20, to_bf16(1.5F)));
}

TEST_F(CudaGradients, EmptyInputsAreAccepted) {
  const DeviceArray<GradientStats> stats(1, {3.0, 4});
  must(measure_gradient<Bf16>(nullptr, nullptr, 0, nullptr, stats.data()));
  EXPECT_EQ(stats.get()[0].sum_of_squares, 0.0);
  EXPECT_EQ(stats.get()[0].non_finite, 0U);
  EXPECT_EQ(pack_gradient<float>(nullptr, nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr),
            cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::gradients_test
