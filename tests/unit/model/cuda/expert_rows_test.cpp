// Kernels of the rows of experts on a GPU, compared with the operations of the host.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/decided.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::expert_rows_test {
namespace {

using test::Decided;
using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::host_ops;
using test::in_every_order;
using test::must;
using test::normals_of;
using test::random_logits;
using test::same_bits;
using test::Uploaded;

template <class T>
class CudaExperts : public test::Kernels {};
using Types = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(CudaExperts, Types);

/// The choices of one of a router's experts, and widths of rows: one access, several, more than the
/// threads of a block hold, more than they keep in registers.
constexpr std::size_t kWidths[] = {8, 24, 520, 1032, 8200, 16392};
struct Chosen {
  RouterShape shape = {37, 6, 2, true};
  Decided decided;
  std::size_t first;
  std::size_t count;

  Chosen() : decided(shape, random_logits(shape)) {
    first = static_cast<std::size_t>(decided.starts[2]) + 1;
    count = static_cast<std::size_t>(decided.starts[3]) - first;
    EXPECT_GT(count, 3U);
  }
  /// The rows at these places.
  [[nodiscard]] ExpertRows rows(const std::int32_t* places) const {
    return {places + first, count, shape.per_token};
  }
};

TAG_TESTS("small_shapes", "CudaExperts*");
TYPED_TEST(CudaExperts, RowsAreGatheredAndPadded) {
  using T = TypeParam;
  Chosen of;
  const Uploaded there(of.decided);
  for (const std::size_t width : kWidths) {
    const std::vector<T> x = normals_of<T>(of.shape.rows * width, 1);
    const DeviceArray<T> x_there(x);
    for (const std::size_t padded : {of.count, of.count + 5}) {
      const std::vector<T> before = normals_of<T>((padded + 1) * width, 2);
      for (const bool weighs : {false, true}) {
        std::vector<T> expected = before;
        host_ops<T>().experts->gather_rows(of.rows(of.decided.places.data()), x.data(),
                                           weighs ? of.decided.weights.data() : nullptr,
                                           expected.data(), padded, width);
        const std::vector<T> found = in_every_order([&] {
          const DeviceArray<T> y(before);
          must(gather_rows<T>(nullptr, of.rows(there.places.data()), x_there.data(),
                              weighs ? there.weights.data() : nullptr, y.data(), padded, width));
          return y.get();
        });
        EXPECT_TRUE(weighs || same_bits(found, expected)) << width;
        expect_close(found, exact(expected), 0.0);
      }
    }
  }
}

TYPED_TEST(CudaExperts, WeightsOfRowsHaveGradients) {
  using T = TypeParam;
  Chosen of;
  of.decided.weights[static_cast<std::size_t>(of.decided.places[of.first])] = 0.0F;
  const DeviceArray<std::int32_t> places(of.decided.places);
  const DeviceArray<float> weights(of.decided.weights);
  for (const std::size_t width : kWidths) {
    const std::size_t size = of.count * width;
    const std::vector<T> activated = normals_of<T>(size, 1);
    const std::vector<T> gradients = normals_of<T>(size, 2);
    const DeviceArray<T> activated_there(activated);
    const DeviceArray<T> gradients_there(gradients);
    const auto found = in_every_order([&] {
      const DeviceArray<float> products(of.decided.weight_gradients);
      must(dot_rows<T>(nullptr, of.rows(places.data()), activated_there.data(),
                       gradients_there.data(), weights.data(), products.data(), width));
      return products.get();
    });
    std::vector<float> products = of.decided.weight_gradients;
    host_ops<T>().experts->dot_rows(of.rows(of.decided.places.data()), activated.data(),
                                    gradients.data(), of.decided.weights.data(), products.data(),
                                    width);
    EXPECT_EQ(products[static_cast<std::size_t>(of.decided.places[of.first])], 0.0F);
    // Weights are at least some hundredths.
    expect_close(found, exact(products), 1e-4 * std::sqrt(double(width)));
    const auto with_bias = in_every_order([&] {
      const DeviceArray<float> sums(products);
      must(dot_bias<T>(nullptr, of.rows(places.data()), activated_there.data(),
                       gradients_there.data(), weights.data(), sums.data(), width));
      return sums.get();
    });
    host_ops<T>().experts->dot_bias(of.rows(of.decided.places.data()), activated.data(),
                                    gradients.data(), of.decided.weights.data(), products.data(),
                                    width);
    expect_close(with_bias, exact(products), 2e-4 * std::sqrt(double(width)));
  }
}

TYPED_TEST(CudaExperts, RowsAreAdded) {
  using T = TypeParam;
  Chosen of;
  const Uploaded there(of.decided);
  for (const std::size_t width : kWidths) {
    const std::vector<float> y = normals_of<float>(of.count * width, 1);
    const std::vector<float> before = normals_of<float>((of.shape.rows + 1) * width, 2);
    const DeviceArray<float> y_there(y);
    for (const bool weighs : {false, true}) {
      std::vector<float> expected = before;
      host_ops<T>().experts->add_rows(of.rows(of.decided.places.data()), y.data(),
                                      weighs ? of.decided.weights.data() : nullptr, expected.data(),
                                      width);
      const float* const factors = weighs ? there.weights.data() : nullptr;
      const std::vector<float> found = in_every_order([&] {
        const DeviceArray<float> sums(before);
        must(add_rows(nullptr, of.rows(there.places.data()), y_there.data(), factors, sums.data(),
                      width));
        return sums.get();
      });
      expect_close(found, exact(expected), 2e-6);
    }
  }
}

TYPED_TEST(CudaExperts, BiasesAreAddedToResults) {
  using T = TypeParam;
  constexpr std::size_t kRows = 5;
  for (const std::size_t width : kWidths) {
    const std::vector<float> before = normals_of<float>((kRows + 1) * width, 2);
    const std::vector<T> bias = normals_of<T>(width, 3);
    const DeviceArray<T> bias_there(bias);
    std::vector<float> expected = before;
    host_ops<T>().elementwise->add_bias(bias.data(), expected.data(), kRows, width);
    EXPECT_NE(expected, before);
    const DeviceArray<float> sums(before);
    must(add_bias<T>(nullptr, bias_there.data(), sums.data(), kRows, width));
    EXPECT_TRUE(same_bits(sums.get(), expected)) << width;
  }
}

TYPED_TEST(CudaExperts, ProductsOfRowsHaveOneSum) {
  for (const std::size_t count : {1U, 31U, 2048U}) {
    const std::vector<float> values = normals_of<float>(count, 1);
    const DeviceArray<float> there(values);
    float expected = 7.0F;
    host_ops<TypeParam>().elementwise->add_sum(values.data(), count, &expected);
    const std::vector<float> found = in_every_order([&] {
      const DeviceArray<float> sum(std::vector<float>{7.0F, 8.0F});
      must(add_partials(nullptr, {there.data(), count, 1}, sum.data(), nullptr));
      return sum.get();
    });
    expect_close(found, {double(expected), 8.0}, 1e-6 * std::sqrt(double(count)));
  }
}

/// Rows that have come from other ranks are processed in the order in which they have come.
TYPED_TEST(CudaExperts, RowsWithoutPlacesAreInOrder) {
  using T = TypeParam;
  Chosen of;
  constexpr std::size_t kWidth = 8;
  const std::vector<float> factors(of.decided.weights.begin(),
                                   of.decided.weights.begin() + std::ptrdiff_t(of.count));
  const ExpertRows in_order = {nullptr, of.count, 1};
  const std::vector<T> x = normals_of<T>(of.count * kWidth, 1);
  const std::vector<T> dy = normals_of<T>(of.count * kWidth, 2);
  std::vector<float> products(of.count);
  host_ops<T>().experts->dot_rows(in_order, x.data(), dy.data(), nullptr, products.data(), kWidth);
  const DeviceArray<T> x_there(x);
  const DeviceArray<T> dy_there(dy);
  const DeviceArray<float> found(of.count, 0.0F);
  must(dot_rows<T>(nullptr, in_order, x_there.data(), dy_there.data(), nullptr, found.data(),
                   kWidth));
  expect_close(found.get(), exact(products), 1e-5);

  // Results return to the places of the choices, as if they had been computed there.
  of.decided.weights[static_cast<std::size_t>(of.decided.places[of.first])] = 0.0F;
  const ExpertRows chosen = of.rows(of.decided.places.data());
  std::vector<float> expected = of.decided.weight_gradients;
  host_ops<T>().experts->dot_rows(chosen, x.data(), dy.data(), of.decided.weights.data(),
                                  expected.data(), kWidth);
  std::vector<float> put = of.decided.weight_gradients;
  host_ops<T>().experts->put_quotients(chosen, products.data(), of.decided.weights.data(),
                                       put.data());
  EXPECT_EQ(put, expected);
  const DeviceArray<std::int32_t> places(of.decided.places);
  const DeviceArray<float> weights(of.decided.weights);
  const DeviceArray<float> products_there(products);
  const DeviceArray<float> put_there(of.decided.weight_gradients);
  must(put_quotients(nullptr, of.rows(places.data()), products_there.data(), weights.data(),
                     put_there.data()));
  EXPECT_EQ(put_there.get(), expected);
}

}  // namespace
}  // namespace ballast::model::cuda::expert_rows_test
