// Attention on a GPU with heads of values that are padded to the width of heads of keys, as in
// latent attention, compared with attention in double.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "src/model/cuda/attention/attention.h"
#include "tests/support/device_array.h"
#include "tests/support/documents.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/attention_reference.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::padded_values_test {
namespace {

using test::AttentionReference;
using test::DeviceArray;
using test::exact;
using test::in_every_order;
using test::must;

AttentionShape padded(std::size_t length, std::size_t heads, std::size_t keys, std::size_t values) {
  return {
      .length = length, .heads = heads, .kv_heads = heads, .head_dim = keys, .value_dim = values};
}

/// Random heads of `shape.heads` in columns `first` .. of rows, with `padding` after
/// value_columns().
std::vector<Bf16> random_heads(const AttentionShape& shape, std::size_t row, std::size_t first,
                               std::uint64_t seed, float padding) {
  auto matrix = test::normals_of<Bf16>(shape.tokens() * row, seed);
  for (std::size_t at = 0; at < shape.tokens() * shape.heads; ++at) {
    Bf16* const head =
        matrix.data() + at / shape.heads * row + first + at % shape.heads * shape.head_dim;
    std::fill(head + shape.value_columns(), head + shape.head_dim, to_bf16(padding));
  }
  return matrix;
}
std::vector<Bf16> random_qkv(const AttentionShape& shape, float padding = 0.0F) {
  return random_heads(shape, shape.row(), shape.width() + shape.kv_width(), 1, padding);
}
std::vector<Bf16> random_dout(const AttentionShape& shape, float padding = 0.0F) {
  return random_heads(shape, shape.width(), 0, 2, padding);
}

struct Results {
  std::vector<Bf16> out;
  std::vector<float> log_sums;
  std::vector<Bf16> dqkv;
};
/// The previous content of the results, which is not finite, must not matter.
Results run(const AttentionShape& shape, const std::vector<Bf16>& qkv,
            const std::vector<Bf16>& dout) {
  const Bf16 nan = to_bf16(std::numeric_limits<float>::quiet_NaN());
  const DeviceArray<Bf16> in(qkv);
  const DeviceArray<Bf16> gradient(dout);
  const auto [out, log_sums, dqkv] = in_every_order([&] {
    const DeviceArray<Bf16> results(dout.size(), nan);
    const DeviceArray<float> sums(shape.log_sums());
    const DeviceArray<Bf16> gradients(qkv.size(), nan);
    const DeviceArray<std::byte> scratch(attention_scratch_bytes(shape, sizeof(Bf16)),
                                         std::byte{0xff});
    must(attention<Bf16>(nullptr, shape, in.data(), results.data(), sums.data()));
    must(attention_backward<Bf16>(nullptr, shape, in.data(), results.data(), sums.data(),
                                  gradient.data(), gradients.data(), scratch.data()));
    return std::tuple(results.get(), sums.get(), gradients.get());
  });
  return {out, log_sums, dqkv};
}

/// The rounding of one operand and of the result, and a small term where others cancel.
void expect_near(const std::vector<Bf16>& found, const AttentionReference::Result& expected) {
  ASSERT_EQ(found.size(), expected.value.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double bound = 0x1.02p-8 * (expected.size[i] + std::abs(expected.value[i])) + 4e-6;
    ASSERT_LE(std::abs(exact(found[i]) - expected.value[i]), bound)
        << "element " << i << ": " << exact(found[i]) << " for " << expected.value[i];
  }
}

class CudaPaddedValues : public test::Kernels {};

TEST_F(CudaPaddedValues, AttentionIsThatOfThePlainFormula) {
  for (const auto& [length, heads, keys, values, window, packed] :
       {std::tuple(std::size_t{70}, std::size_t{2}, std::size_t{192}, std::size_t{128},
                   std::size_t{0}, false),
        std::tuple(std::size_t{140}, std::size_t{1}, std::size_t{192}, std::size_t{128},
                   std::size_t{33}, true),
        std::tuple(std::size_t{35}, std::size_t{2}, std::size_t{136}, std::size_t{120},
                   std::size_t{0}, true)}) {
    AttentionShape shape = padded(length, heads, keys, values);
    SCOPED_TRACE(testing::Message() << length << " rows, heads of " << keys << " and " << values);
    shape.mask.window = window;
    const std::vector<std::int32_t> positions = test::packed_positions(1, length);
    const DeviceArray<std::int32_t> uploaded(positions);
    const std::vector<Bf16> qkv = random_qkv(shape);
    const std::vector<Bf16> dout = random_dout(shape);
    if (packed) shape.mask.positions = uploaded.data();
    const Results found = run(shape, qkv, dout);
    if (packed) shape.mask.positions = positions.data();
    const AttentionReference reference{shape};
    const auto expected = reference.forward(exact(qkv));
    expect_near(found.out, expected.out);
    for (std::size_t i = 0; i < found.log_sums.size(); ++i) {
      ASSERT_NEAR(found.log_sums[i], expected.log_sums[i], 1e-5) << "row " << i;
    }
    expect_near(found.dqkv, reference.backward(exact(qkv), exact(found.out), exact(dout)));
  }
}

TAG_TESTS("small_shapes", "CudaPaddedValues.PaddingIsNotComputed");
/// Kernels that computed the padding would read it.
TEST_F(CudaPaddedValues, PaddingIsNotComputed) {
  const AttentionShape shape = padded(67, 2, 192, 128);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Results expected = run(shape, random_qkv(shape), random_dout(shape));
  const Results found = run(shape, random_qkv(shape, nan), random_dout(shape, nan));
  EXPECT_TRUE(test::same_bits(found.out, expected.out));
  EXPECT_TRUE(test::same_bits(found.dqkv, expected.dqkv));
}

}  // namespace
}  // namespace ballast::model::cuda::padded_values_test
