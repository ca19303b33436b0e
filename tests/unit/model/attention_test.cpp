#include "src/model/host/attention.h"

#include <gtest/gtest.h>

#include "tests/support/documents.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/attention_reference.h"
#include "tests/unit/model/numbers.h"
#include "tests/unit/model/reference.h"

namespace ballast::model::host::attention_test {
namespace {

using test::central_difference;
using test::dot;
using test::normals;
using test::Reference;
using test::relative_error;
using Values = std::vector<double>;

Reference reference_of(const AttentionShape& shape) {
  Reference reference;
  reference.config.num_heads = shape.heads;
  reference.config.num_kv_heads = shape.kv_heads;
  reference.config.head_dim = shape.head_dim;
  reference.sequences = shape.sequences;
  reference.length = shape.length;
  reference.window = shape.mask.window;
  if (shape.mask.positions != nullptr) {
    reference.positions.assign(shape.mask.positions, shape.mask.positions + shape.tokens());
  }
  return reference;
}

/// Columns [first, first + width) of every row of qkv.
Values part(const Values& qkv, const AttentionShape& shape, std::size_t first, std::size_t width) {
  Values out;
  for (std::size_t row = 0; row < shape.tokens(); ++row) {
    for (std::size_t i = 0; i < width; ++i) out.push_back(qkv[row * shape.row() + first + i]);
  }
  return out;
}

Values plain(const AttentionShape& shape, const Values& qkv) {
  const std::size_t h = shape.width();
  const std::size_t kv = shape.kv_width();
  return reference_of(shape).attention(part(qkv, shape, 0, h), part(qkv, shape, h, kv),
                                       part(qkv, shape, h + kv, kv));
}

struct Sizes {
  std::size_t length;
  std::size_t window;
  bool packed = false;  ///< several documents per sequence
};
class AttentionShapes : public testing::TestWithParam<Sizes> {
 protected:
  /// Forward and backward in fp32 with every instruction set; `check` gets out and dqkv.
  template <class Check>
  void run(const AttentionShape& shape, const Values& qkv, const Values& dout, const Check& check) {
    const std::vector<float> in(qkv.begin(), qkv.end());
    const std::vector<float> dy(dout.begin(), dout.end());
    for (const KernelTable* table : kernel_tables()) {
      Attention<float> attention(shape, table->f32.rows, 2);
      std::vector<float> out(dout.size());
      std::vector<float> dqkv(qkv.size());
      std::vector<float> log_sums(shape.log_sums());
      std::vector<std::byte> scratch(attention.scratch_bytes() + 64);
      attention.forward(shape.mask, {}, in.data(), out.data(), log_sums.data(), scratch.data());
      attention.backward(shape.mask, {}, in.data(), out.data(), log_sums.data(), dy.data(),
                         dqkv.data(), scratch.data());
      check(out, dqkv);
    }
  }
};

TAG_TESTS("slow_sanitized,slow_scalar", "*AttentionShapes.*/1200*");
TEST_P(AttentionShapes, ForwardAndBackwardAgreeWithThePlainFormula) {
  // Groups of three; lengths below, at and above the size of a tile, and above a block of keys.
  const auto [length, window, packed] = GetParam();
  const std::vector<std::int32_t> positions = test::packed_positions(2, length);
  const AttentionMask mask{window, packed ? positions.data() : nullptr};
  const AttentionShape shape{2, length, 6, 2, 10, mask};
  Values qkv = normals(shape.tokens() * shape.row(), 1);
  for (double& value : qkv) value = static_cast<float>(value);
  Values dout = normals(shape.tokens() * shape.width(), 2);
  for (double& value : dout) value = static_cast<float>(value);
  const Values expected = plain(shape, qkv);
  const Values direction = normals(qkv.size(), 3);
  double step = 0.0;
  const std::function<double()> along = [&] {
    Values moved = qkv;
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * direction[i];
    return dot(plain(shape, moved), dout);
  };
  const double derivative = central_difference(along, step);
  const auto loss = [&] { return dot(plain(shape, qkv), dout); };
  // One query, one key, one value, in the last sequence.
  const std::size_t row = (shape.tokens() - shape.length / 2 - 1) * shape.row();
  const std::vector<std::size_t> samples = {row + 3, row + shape.width() + 12,
                                            row + shape.width() + shape.kv_width() + 5};
  std::vector<double> derivatives;
  for (const std::size_t sample : samples) {
    derivatives.push_back(central_difference(loss, qkv[sample]));
  }
  run(shape, qkv, dout, [&](const std::vector<float>& out, const std::vector<float>& dqkv) {
    EXPECT_LT(relative_error(out, expected), 1e-6);
    double sum = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < dqkv.size(); ++i) {
      sum += static_cast<double>(dqkv[i]) * direction[i];
      size += static_cast<double>(dqkv[i]) * static_cast<double>(dqkv[i]);
    }
    EXPECT_NEAR(sum, derivative, 1e-5 * std::sqrt(size));
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_NEAR(dqkv[samples[i]], derivatives[i], 1e-5 * std::max(1.0, std::abs(derivatives[i])));
    }
  });
}

TEST_P(AttentionShapes, SinksAreKeysWithoutValues) {
  const auto [length, window, packed] = GetParam();
  const std::vector<std::int32_t> positions = test::packed_positions(2, length);
  const AttentionMask mask{window, packed ? positions.data() : nullptr};
  const AttentionShape shape{2, length, 6, 2, 10, mask};
  const std::vector<float> qkv = normals<float>(shape.tokens() * shape.row(), 1);
  const std::vector<float> dout = normals<float>(shape.tokens() * shape.width(), 2);
  const std::vector<float> sinks = {0.5F, -3.0F, 4.0F, 200.0F, -200.0F, 1.0F};
  const auto exact = [](const std::vector<float>& values) {
    return Values(values.begin(), values.end());
  };
  const test::AttentionReference reference{shape, exact(sinks)};
  const auto expected = reference.forward(exact(qkv));
  const auto gradient = reference.backward(exact(qkv), expected.out.value, exact(dout));
  const auto of_sinks = reference.of_sinks(exact(qkv), expected.out.value, exact(dout));
  for (const KernelTable* table : kernel_tables()) {
    Attention<float> attention(shape, table->f32.rows, 2);
    std::vector<float> out(dout.size());
    std::vector<float> dqkv(qkv.size());
    std::vector<float> log_sums(shape.log_sums());
    std::vector<float> dsinks(shape.heads, 1.0F);
    std::vector<std::byte> scratch(attention.scratch_bytes() + 64);
    attention.forward(mask, {sinks.data(), nullptr}, qkv.data(), out.data(), log_sums.data(),
                      scratch.data());
    attention.backward(mask, {sinks.data(), dsinks.data()}, qkv.data(), out.data(), log_sums.data(),
                       dout.data(), dqkv.data(), scratch.data());
    EXPECT_LT(relative_error(out, expected.out.value), 1e-6);
    EXPECT_LT(relative_error(dqkv, gradient.value), 1e-5);
    for (std::size_t h = 0; h < shape.heads; ++h) {
      EXPECT_NEAR(dsinks[h] - 1.0F, of_sinks.value[h], 2e-6 * (1.0 + of_sinks.size[h])) << h;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, AttentionShapes,
                         testing::Values(Sizes{1, 0}, Sizes{63, 0}, Sizes{64, 0}, Sizes{65, 0},
                                         Sizes{150, 0}, Sizes{530, 0}, Sizes{65, 1}, Sizes{150, 70},
                                         Sizes{530, 13}, Sizes{63, 500}, Sizes{1, 0, true},
                                         Sizes{65, 0, true}, Sizes{150, 20, true},
                                         Sizes{1200, 0, true}),
                         [](const auto& info) {
                           return std::to_string(info.param.length) + "Window" +
                                  std::to_string(info.param.window) +
                                  (info.param.packed ? "Packed" : "");
                         });

TEST(AttentionMemory, GrowsLinearlyWithTheSequence) {
  const RowKernels<float>& kernels = kernel_tables().front()->f32.rows;
  const auto bytes = [&](std::size_t length) {
    const AttentionShape shape{1, length, 4, 2, 64};
    return static_cast<double>(Attention<float>(shape, kernels, 2).scratch_bytes());
  };
  EXPECT_LT(bytes(8192) / bytes(4096), 2.01);
  EXPECT_LT(bytes(8192), 2.0 * 8192 * 64 * 32);
}

TEST(AttentionCausality, LaterTokensDoNotChangeEarlierRows) {
  const AttentionShape shape{1, 100, 2, 1, 8};
  std::vector<float> qkv = normals<float>(shape.tokens() * shape.row(), 1);
  const RowKernels<float>& kernels = kernel_tables().back()->f32.rows;
  Attention<float> attention(shape, kernels, 2);
  std::vector<float> log_sums(shape.log_sums());
  std::vector<std::byte> scratch(attention.scratch_bytes() + 64);
  std::vector<float> before(shape.tokens() * shape.width());
  std::vector<float> after(before.size());
  attention.forward({}, {}, qkv.data(), before.data(), log_sums.data(), scratch.data());
  for (std::size_t i = 70 * shape.row(); i < qkv.size(); ++i) qkv[i] = 1e9F;
  attention.forward({}, {}, qkv.data(), after.data(), log_sums.data(), scratch.data());
  before.resize(70 * shape.width());
  after.resize(70 * shape.width());
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace ballast::model::host::attention_test
