// Kernels of values that layers share besides the residual stream, compared with the operations of
// the host.
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::links_test {
namespace {

using test::DeviceArray;
using test::host_ops;
using test::in_every_order;
using test::must;
using test::normals_of;
using test::same_bits;

template <class T>
class CudaLinks : public test::Kernels {};
using Types = testing::Types<float, Bf16, F16>;
TYPED_TEST_SUITE(CudaLinks, Types);

/// A part of a warp, and more pieces than a block has threads.
constexpr std::size_t kWidths[] = {8, 1048};
constexpr std::size_t kRows = 5;

TAG_TESTS("small_shapes", "CudaLinks*");
TYPED_TEST(CudaLinks, GradientsOfReadersAreSummedAndAddedOnce) {
  using T = TypeParam;
  for (const std::size_t width : kWidths) {
    const std::size_t step = width + 16;
    const std::vector<T> x = normals_of<T>(kRows * step, 1);
    const std::vector<float> before = normals_of<float>(kRows * width, 2);
    const DeviceArray<T> there(x);
    for (const bool adds : {false, true}) {
      std::vector<float> sums = before;
      host_ops<T>().links->sum_columns(x.data(), step, kRows, width, adds, sums.data());
      const auto found = in_every_order([&] {
        const DeviceArray<float> out(before);
        must(put_sums(nullptr, there.data(), step, {kRows, width}, adds, out.data()));
        return out.get();
      });
      EXPECT_TRUE(same_bits(found, sums)) << width << adds;
    }
    std::vector<T> expected = x;
    host_ops<T>().links->add_sums(before.data(), kRows, width, expected.data(), step);
    const DeviceArray<float> sums(before);
    const auto found = in_every_order([&] {
      const DeviceArray<T> out(x);
      must(add_sums(nullptr, sums.data(), {kRows, width}, out.data(), step));
      return out.get();
    });
    EXPECT_TRUE(same_bits(found, expected)) << width;
  }
}

/// Rows of a table for seven tokens, and what they are mixed with.
template <class T>
struct Mixed {
  std::size_t width;
  std::size_t step;
  TokenMix how = {7.5F, 0.7F};

  explicit Mixed(std::size_t width_) : width(width_), step(width_ + 24) {}

  [[nodiscard]] static std::size_t rows() { return 7; }
  [[nodiscard]] std::vector<T> table_rows() const { return normals_of<T>(rows() * width, 3); }
  [[nodiscard]] std::vector<T> x() const { return normals_of<T>(rows() * step, 4); }
  [[nodiscard]] std::vector<T> dy() const { return normals_of<T>(rows() * width, 5); }
  [[nodiscard]] std::vector<float> old_gradient() const {
    return normals_of<float>(rows() * width, 6);
  }

  [[nodiscard]] std::vector<T> on_device() const {
    const DeviceArray<T> from(table_rows());
    const DeviceArray<T> inputs(x());
    return in_every_order([&] {
      const DeviceArray<T> out(dy());
      must(
          mix_rows<T>(nullptr, {from.data(), rows(), width}, how, inputs.data(), step, out.data()));
      return out.get();
    });
  }
  /// Gradients of the rows and of x.
  using Gradients = std::tuple<std::vector<float>, std::vector<T>>;
  [[nodiscard]] Gradients gradients_on_device(bool of_rows, bool of_x) const {
    const DeviceArray<T> gradient(dy());
    return in_every_order([&] {
      const DeviceArray<float> to_rows(old_gradient());
      const DeviceArray<T> dx(x());
      must(mix_rows_backward<T>(nullptr, {gradient.data(), rows(), width}, how,
                                of_rows ? to_rows.data() : nullptr, of_x ? dx.data() : nullptr,
                                step));
      return Gradients(to_rows.get(), dx.get());
    });
  }
  [[nodiscard]] Gradients gradients_on_host(bool of_rows, bool of_x) const {
    Gradients found(old_gradient(), x());
    auto& [to_rows, dx] = found;
    const std::vector<T> gradient = dy();
    host_ops<T>().links->mix_rows_backward({gradient.data(), rows(), width}, how,
                                           of_rows ? to_rows.data() : nullptr,
                                           of_x ? dx.data() : nullptr, step);
    return found;
  }
};

TYPED_TEST(CudaLinks, RowsOfTokensAreMixed) {
  using T = TypeParam;
  for (const std::size_t width : kWidths) {
    Mixed<T> of(width);
    std::vector<T> expected(of.rows() * width);
    host_ops<T>().links->mix_rows({of.table_rows().data(), of.rows(), width}, of.how, of.x().data(),
                                  of.step, expected.data());
    EXPECT_TRUE(same_bits(of.on_device(), expected)) << width;
  }
}

TYPED_TEST(CudaLinks, GradientsOfMixedRows) {
  for (const std::size_t width : kWidths) {
    const Mixed<TypeParam> of(width);
    for (const bool of_rows : {false, true}) {
      for (const bool of_x : {false, true}) {
        EXPECT_TRUE(
            same_bits(of.gradients_on_device(of_rows, of_x), of.gradients_on_host(of_rows, of_x)))
            << width << of_rows << of_x;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::model::cuda::links_test
