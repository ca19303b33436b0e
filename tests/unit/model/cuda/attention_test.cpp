// Attention on a GPU, compared with attention in double.
#include "src/model/cuda/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/random.h"

#include "tests/support/device_array.h"
#include "tests/support/documents.h"
#include "tests/support/in_every_order.h"
#include "tests/support/sanitizers.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/attention_reference.h"

namespace ballast::model::cuda::attention_test {
namespace {

using test::AttentionReference;
using test::DeviceArray;
using test::in_every_order;
using Values = std::vector<double>;

template <class T>
T narrowed(double value) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(value);
  } else {
    return to_bf16(static_cast<float>(value));
  }
}
double widened(float value) {
  return value;
}
double widened(Bf16 value) {
  return to_float(value);
}
template <class T>
Values widened(const std::vector<T>& values) {
  Values out;
  for (const T value : values) out.push_back(widened(value));
  return out;
}
template <class T>
std::vector<T> narrowed(const Values& values) {
  std::vector<T> out;
  for (const double value : values) out.push_back(narrowed<T>(value));
  return out;
}
template <class T>
std::vector<T> random_values(std::size_t size, std::uint64_t seed, double deviation = 1.0) {
  std::vector<T> out;
  for (std::size_t i = 0; i < size; ++i) {
    out.push_back(narrowed<T>(deviation * random_normal(seed, i)));
  }
  return out;
}
template <class T>
T nan_of() {
  return narrowed<T>(std::numeric_limits<double>::quiet_NaN());
}

std::string text(const AttentionShape& shape) {
  return std::to_string(shape.sequences) + " sequences of " + std::to_string(shape.length) + ", " +
         std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " heads of " +
         std::to_string(shape.head_dim) +
         (shape.mask.window == 0 ? "" : ", window " + std::to_string(shape.mask.window)) +
         (shape.mask.positions == nullptr ? "" : ", packed") +
         (shape.cap == 0.0 ? "" : ", capped at " + std::to_string(shape.cap));
}

/// Lengths below, at and above the borders of tiles; padded and unpadded widths; groups; windows
/// from one key to more than there are, and documents, so that rows, warps and whole tiles do not
/// see some keys; heads too wide for tensor cores; soft caps that bend most scores.
struct Case {
  AttentionShape shape;
  bool packed = false;
};
const std::vector<Case> kCases = {
    {{2, 1, 3, 1, 8}},
    {{3, 15, 2, 2, 16}},
    {{1, 63, 3, 1, 64}},
    {{1, 64, 4, 2, 72}},
    {{2, 65, 1, 1, 32}},
    {{1, 130, 2, 1, 64}},
    {{1, 140, 1, 1, 128}},
    {{1, 70, 1, 1, 256}},
    {{1, 35, 2, 2, 200}},
    {{2, 130, 2, 1, 64, {1}}},
    {{1, 200, 2, 2, 32, {40}}},
    {{1, 205, 1, 1, 128, {70}}},
    {{1, 100, 3, 1, 256, {33}}},
    {{1, 140, 1, 1, 64, {139}}},
    {{1, 66, 1, 1, 16, {500}}},
    {{2, 1, 3, 1, 8}, true},
    {{2, 130, 2, 1, 64}, true},
    {{1, 200, 4, 2, 32, {40}}, true},
    {{3, 205, 1, 1, 128}, true},
    {{1, 100, 2, 1, 256}, true},
    {{2, 66, 1, 1, 16, {3}}, true},
    {{1, 270, 2, 1, 120}},
    {{1, 20, 1, 1, 264}},
    {{1, 34, 1, 1, 512, {}, 0.0, 1.5}, true},
    {{1, 70, 2, 1, 24, {}, 0.4, 0.8}, true},
    {{2, 66, 2, 2, 256, {30}, 0.0, 1.2}},
};

/// The cases of this build; under a sanitizer every second one, which still has each kernel.
std::vector<Case> cases() {
  std::vector<Case> some;
  for (std::size_t i = 0; i < kCases.size(); i += test::kSanitized ? 2 : 1) {
    some.push_back(kCases[i]);
  }
  return some;
}

/// Whether products are those of warpgroups, for each way that the emulated GPU has for the shape.
/// A GPU chooses automatically.
template <class T>
std::vector<bool> ways([[maybe_unused]] const AttentionShape& shape) {
#if defined(BALLAST_EMULATED_GPU)
  const std::size_t width = (shape.head_dim + 31) / 32 * 32;
  const bool fits = shape.cap == 0.0 && (width == 64 || width == 128);
  if (std::is_same_v<T, Bf16> && fits) return {false, true};
#endif
  return {false};
}
class WithWarpgroups {
 public:
  explicit WithWarpgroups([[maybe_unused]] bool has) {
#if defined(BALLAST_EMULATED_GPU)
    test::emulation::set_warpgroup_products(has);
#endif
  }
  WithWarpgroups(const WithWarpgroups&) = delete;
  WithWarpgroups& operator=(const WithWarpgroups&) = delete;
  ~WithWarpgroups() {
#if defined(BALLAST_EMULATED_GPU)
    test::emulation::set_warpgroup_products(false);
#endif
  }
};

/// The shape of a case with documents in host memory, and in device memory.
struct Shapes {
  explicit Shapes(const Case& of)
      : positions(test::packed_positions(of.shape.sequences, of.shape.length)),
        uploaded(positions),
        on_host(of.shape),
        on_device(of.shape) {
    if (!of.packed) return;
    on_host.mask.positions = positions.data();
    on_device.mask.positions = uploaded.data();
  }
  std::vector<std::int32_t> positions;
  DeviceArray<std::int32_t> uploaded;
  AttentionShape on_host;
  AttentionShape on_device;
};

/// Tolerance: the rounding of one operand and of the result to T, some more for fp32, and, where
/// terms cancel (inputs have a size of 1), a small absolute term.
template <class T>
constexpr double kUnit = std::is_same_v<T, float> ? 0x1p-19 : 0x1.02p-8;

template <class T>
void expect_near(const std::vector<T>& found, const AttentionReference::Result& expected,
                 const std::string& what) {
  ASSERT_EQ(found.size(), expected.value.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double bound = kUnit<T> * (expected.size[i] + std::abs(expected.value[i])) + 4e-6;
    // Not EXPECT_NEAR, which is slow and does not report the index.
    ASSERT_LE(std::abs(widened(found[i]) - expected.value[i]), bound)
        << what << ", element " << i << ": " << widened(found[i]) << " for " << expected.value[i];
  }
}

template <class T>
struct Forward {
  std::vector<T> out;
  std::vector<float> log_sums;
};
/// The previous content must not matter. `plain`: by the plain kernels.
template <class T>
Forward<T> forward(const AttentionShape& shape, const std::vector<T>& qkv, bool plain = false) {
  const auto kernel = plain ? &plain_attention<T> : &attention<T>;
  const DeviceArray<T> in(qkv);
  const auto [out, log_sums] = in_every_order([&] {
    const DeviceArray<T> out(shape.tokens() * shape.width(), nan_of<T>());
    const DeviceArray<float> log_sums(shape.log_sums(), nan_of<float>());
    EXPECT_EQ(kernel(nullptr, shape, in.data(), out.data(), log_sums.data()), cudaSuccess);
    return std::tuple(out.get(), log_sums.get());
  });
  return {out, log_sums};
}

/// Gradient of qkv.
template <class T>
std::vector<T> backward(const AttentionShape& shape, const std::vector<T>& qkv,
                        const Forward<T>& result, const std::vector<T>& dout, bool plain = false) {
  const auto kernel = plain ? &plain_attention_backward<T> : &attention_backward<T>;
  const DeviceArray<T> in(qkv);
  const DeviceArray<T> out(result.out);
  const DeviceArray<float> log_sums(result.log_sums);
  const DeviceArray<T> gradient(dout);
  return in_every_order([&] {
    const DeviceArray<T> dqkv(qkv.size(), nan_of<T>());
    const DeviceArray<std::byte> scratch(attention_scratch_bytes(shape, sizeof(T)),
                                         std::byte{0xff});
    EXPECT_EQ(kernel(nullptr, shape, in.data(), out.data(), log_sums.data(), gradient.data(),
                     dqkv.data(), scratch.data()),
              cudaSuccess);
    return dqkv.get();
  });
}

template <class T>
class Attention : public test::Kernels {};
using Types = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(Attention, Types);

TYPED_TEST(Attention, ForwardIsThatOfThePlainFormula) {
  using T = TypeParam;
  for (const Case& of : cases()) {
    const Shapes shapes(of);
    const AttentionShape& shape = shapes.on_host;
    const auto qkv = random_values<T>(shape.tokens() * shape.row(), 1);
    const auto expected = AttentionReference{shape}.forward(widened(qkv));
    for (const bool by_warpgroups : ways<T>(shape)) {
      const WithWarpgroups way(by_warpgroups);
      const std::string name = text(shape) + (by_warpgroups ? ", by warpgroups" : "");
      const Forward<T> found = forward(shapes.on_device, qkv);
      expect_near(found.out, expected.out, name);
      for (std::size_t i = 0; i < found.log_sums.size(); ++i) {
        ASSERT_NEAR(found.log_sums[i], expected.log_sums[i], 1e-5) << name << ", row " << i;
      }
    }
  }
}

TYPED_TEST(Attention, BackwardIsThatOfThePlainFormula) {
  using T = TypeParam;
  for (const Case& of : cases()) {
    const Shapes shapes(of);
    const AttentionShape& shape = shapes.on_host;
    const auto qkv = random_values<T>(shape.tokens() * shape.row(), 2);
    const auto dout = random_values<T>(shape.tokens() * shape.width(), 3);
    const AttentionReference reference{shape};
    const auto exact = reference.forward(widened(qkv));
    const Forward<T> result{narrowed<T>(exact.out.value), narrowed<float>(exact.log_sums)};
    const auto expected = reference.backward(widened(qkv), widened(result.out), widened(dout));
    for (const bool by_warpgroups : ways<T>(shape)) {
      const WithWarpgroups way(by_warpgroups);
      expect_near(backward(shapes.on_device, qkv, result, dout), expected,
                  text(shape) + (by_warpgroups ? ", by warpgroups" : ""));
    }
  }
}

class PlainAttention : public test::Kernels {};

/// The kernels are those that the tests above run in fp32.
TEST_F(PlainAttention, InBf16IsThatOfThePlainFormula) {
  for (std::size_t i = 3; i < kCases.size(); i += 8) {
    const Shapes shapes(kCases[i]);
    const AttentionShape& shape = shapes.on_host;
    const auto qkv = random_values<Bf16>(shape.tokens() * shape.row(), 2);
    const auto dout = random_values<Bf16>(shape.tokens() * shape.width(), 3);
    const AttentionReference reference{shape};
    const auto exact = reference.forward(widened(qkv));
    expect_near(forward(shapes.on_device, qkv, true).out, exact.out, text(shape));
    const Forward<Bf16> result{narrowed<Bf16>(exact.out.value), narrowed<float>(exact.log_sums)};
    expect_near(backward(shapes.on_device, qkv, result, dout, true),
                reference.backward(widened(qkv), widened(result.out), widened(dout)), text(shape));
  }
}

/// Small sinks, large ones, and one that dominates everything else.
template <class T>
std::vector<T> sinks_of(const AttentionShape& shape) {
  std::vector<T> sinks = random_values<T>(shape.heads, 9, 3.0);
  if (shape.heads > 2) sinks.back() = narrowed<T>(200.0);
  return sinks;
}

TYPED_TEST(Attention, SinksAreKeysWithoutValues) {
  using T = TypeParam;
  for (const Case& of : cases()) {
    const Shapes shapes(of);
    const AttentionShape& shape = shapes.on_host;
    const auto qkv = random_values<T>(shape.tokens() * shape.row(), 1);
    const std::vector<T> sinks = sinks_of<T>(shape);
    const auto expected = AttentionReference{shape, widened(sinks)}.forward(widened(qkv));
    const DeviceArray<T> sinks_there(sinks);
    const Forward<T> without = forward(shapes.on_device, qkv);
    const auto [out, log_sums] = in_every_order([&] {
      const DeviceArray<T> results(without.out);
      const DeviceArray<float> sums(without.log_sums);
      EXPECT_EQ(
          add_sinks<T>(nullptr, shapes.on_device, sinks_there.data(), results.data(), sums.data()),
          cudaSuccess);
      return std::tuple(results.get(), sums.get());
    });
    // The result is rounded once more.
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double bound =
          kUnit<T> * (expected.out.size[i] + 2.0 * std::abs(expected.out.value[i])) + 4e-6;
      ASSERT_LE(std::abs(widened(out[i]) - expected.out.value[i]), bound) << text(shape) << i;
    }
    for (std::size_t i = 0; i < log_sums.size(); ++i) {
      ASSERT_NEAR(log_sums[i], expected.log_sums[i], 2e-5) << text(shape) << ", row " << i;
    }
  }
}

TYPED_TEST(Attention, GradientsOfSinksAreThoseOfThePlainFormula) {
  using T = TypeParam;
  // The kernels are those of attention without sinks, which are tested with all shapes.
  for (std::size_t i = 0; i < kCases.size(); i += test::kSanitized ? 6 : 3) {
    const Shapes shapes(kCases[i]);
    const AttentionShape& shape = shapes.on_host;
    const auto qkv = random_values<T>(shape.tokens() * shape.row(), 2);
    const auto dout = random_values<T>(shape.tokens() * shape.width(), 3);
    const std::vector<T> sinks = sinks_of<T>(shape);
    const AttentionReference reference{shape, widened(sinks)};
    const auto exact = reference.forward(widened(qkv));
    const Forward<T> result{narrowed<T>(exact.out.value), narrowed<float>(exact.log_sums)};
    expect_near(backward(shapes.on_device, qkv, result, dout),
                reference.backward(widened(qkv), widened(result.out), widened(dout)), text(shape));
    const DeviceArray<T> in(qkv);
    const DeviceArray<T> out(result.out);
    const DeviceArray<float> log_sums(result.log_sums);
    const DeviceArray<T> gradient(dout);
    const DeviceArray<T> sinks_there(sinks);
    const DeviceArray<T> dqkv(qkv.size());
    const DeviceArray<std::byte> scratch(attention_scratch_bytes(shape, sizeof(T)));
    ASSERT_EQ(attention_backward<T>(nullptr, shapes.on_device, in.data(), out.data(),
                                    log_sums.data(), gradient.data(), dqkv.data(), scratch.data()),
              cudaSuccess);
    const auto found = in_every_order([&] {
      const DeviceArray<float> sums(shape.heads, 1.0F);
      EXPECT_EQ(add_sink_gradients<T>(nullptr, shapes.on_device, sinks_there.data(), scratch.data(),
                                      sums.data()),
                cudaSuccess);
      return sums.get();
    });
    const auto expected = reference.of_sinks(widened(qkv), widened(result.out), widened(dout));
    for (std::size_t h = 0; h < shape.heads; ++h) {
      ASSERT_NEAR(found[h] - 1.0, expected.value[h], 1e-5 * (1.0 + expected.size[h]))
          << text(shape) << ", head " << h;
    }
  }
}

/// A sequence between two sequences of NaN.
template <class T>
std::vector<T> between_nans(const AttentionShape& one, std::size_t width) {
  std::vector<T> values(3 * one.length * width, nan_of<T>());
  const auto good = random_values<T>(one.length * width, 5);
  std::copy(good.begin(), good.end(), values.begin() + one.length * width);
  return values;
}
/// The middle third of the rows.
template <class T>
std::vector<T> middle(const std::vector<T>& values) {
  const std::size_t third = values.size() / 3;
  return {values.begin() + third, values.begin() + 2 * third};
}

TAG_TESTS("small_shapes", "Attention/1.Seq*");
TYPED_TEST(Attention, SequencesAreIndependent) {
  using T = TypeParam;
  const AttentionShape one{1, 69, 2, 1, 24};
  AttentionShape three = one;
  three.sequences = 3;
  const auto qkv = between_nans<T>(one, one.row());
  const Forward<T> alone = forward(one, middle(qkv));
  const Forward<T> found = forward(three, qkv);
  EXPECT_TRUE(test::same_bits(middle(found.out), alone.out));
  EXPECT_TRUE(test::same_bits(middle(found.log_sums), alone.log_sums));
  const auto dout = between_nans<T>(one, one.width());
  EXPECT_TRUE(test::same_bits(middle(backward(three, qkv, found, dout)),
                              backward(one, middle(qkv), alone, middle(dout))));
}

TAG_TESTS("small_shapes", "Attention/1.Later*");
TYPED_TEST(Attention, LaterTokensDoNotChangeEarlierRows) {
  using T = TypeParam;
  const AttentionShape shape{1, 140, 1, 1, 16};
  auto qkv = random_values<T>(shape.tokens() * shape.row(), 6);
  const Forward<T> before = forward(shape, qkv);
  for (const std::size_t row : {139U, 129U, 100U, 64U, 17U}) {
    for (std::size_t i = row * shape.row(); i < qkv.size(); ++i) qkv[i] = narrowed<T>(1e4);
    Forward<T> after = forward(shape, qkv);
    after.out.resize(row * shape.width());
    std::vector<T> expected = before.out;
    expected.resize(after.out.size());
    EXPECT_TRUE(test::same_bits(after.out, expected)) << row;
  }
}

TYPED_TEST(Attention, GreatScoresNeitherOverflowNorVanish) {
  using T = TypeParam;
  const AttentionShape shape{1, 90, 2, 1, 16};
  // |q . k| / 4 is about 100, and several times that for single pairs.
  const auto qkv = random_values<T>(shape.tokens() * shape.row(), 7, 10.0);
  const auto expected = AttentionReference{shape}.forward(widened(qkv));
  const Forward<T> found = forward(shape, qkv);
  // The rounding of the scores in fp32 grows with their size.
  for (std::size_t i = 0; i < found.log_sums.size(); ++i) {
    ASSERT_NEAR(found.log_sums[i], expected.log_sums[i], 5e-4);
  }
  for (std::size_t i = 0; i < found.out.size(); ++i) {
    ASSERT_NEAR(widened(found.out[i]), expected.out.value[i],
                2 * (kUnit<T> + 5e-4) * expected.out.size[i]);
  }
  const auto dout = random_values<T>(found.out.size(), 8);
  const auto gradient =
      AttentionReference{shape}.backward(widened(qkv), widened(found.out), widened(dout));
  const auto dqkv = backward(shape, qkv, found, dout);
  for (std::size_t i = 0; i < dqkv.size(); ++i) {
    ASSERT_NEAR(widened(dqkv[i]), gradient.value[i],
                2 * (kUnit<T> + 1e-3) * gradient.size[i] + 1e-3);
  }
}

TYPED_TEST(Attention, NothingIsWrittenBehindTheResults) {
  using T = TypeParam;
  const AttentionShape shape{2, 66, 1, 1, 40};
  constexpr std::size_t kExtra = 10000;
  const auto rest = [](const auto& array) {
    const auto values = array.get();
    return std::vector(values.end() - static_cast<std::ptrdiff_t>(kExtra), values.end());
  };
  const DeviceArray<T> in(random_values<T>(shape.tokens() * shape.row(), 8));
  const DeviceArray<T> out(shape.tokens() * shape.width() + kExtra, narrowed<T>(3));
  const DeviceArray<T> dqkv(shape.tokens() * shape.row() + kExtra, narrowed<T>(3));
  const DeviceArray<float> log_sums(shape.log_sums() + kExtra, 3.0F);
  const std::size_t bytes = attention_scratch_bytes(shape, sizeof(T));
  const DeviceArray<std::byte> scratch(bytes + kExtra, std::byte{3});
  ASSERT_EQ(attention<T>(nullptr, shape, in.data(), out.data(), log_sums.data()), cudaSuccess);
  ASSERT_EQ(attention_backward<T>(nullptr, shape, in.data(), out.data(), log_sums.data(),
                                  out.data(), dqkv.data(), scratch.data()),
            cudaSuccess);
  EXPECT_EQ(rest(out), std::vector<T>(kExtra, narrowed<T>(3)));
  EXPECT_EQ(rest(dqkv), std::vector<T>(kExtra, narrowed<T>(3)));
  EXPECT_EQ(rest(log_sums), std::vector<float>(kExtra, 3.0F));
  EXPECT_EQ(rest(scratch), std::vector<std::byte>(kExtra, std::byte{3}));
}

TYPED_TEST(Attention, EmptyInputsAreAccepted) {
  using T = TypeParam;
  for (const AttentionShape& shape :
       {AttentionShape{0, 5, 2, 1, 8}, AttentionShape{5, 0, 2, 1, 8}}) {
    EXPECT_EQ(attention<T>(nullptr, shape, nullptr, nullptr, nullptr), cudaSuccess);
    EXPECT_EQ(
        attention_backward<T>(nullptr, shape, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
        cudaSuccess);
    EXPECT_EQ(attention_scratch_bytes(shape, sizeof(T)), 0U);
  }
}

TYPED_TEST(Attention, ExtentsThatNoKernelIsMadeForAreRefused) {
  using T = TypeParam;
  for (const AttentionShape& shape :
       {AttentionShape{1, 2, 1, 1, 520}, AttentionShape{1, 2, 1, 1, 12},
        AttentionShape{1, 2, 3, 2, 8}}) {
    EXPECT_EQ(attention<T>(nullptr, shape, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(
        attention_backward<T>(nullptr, shape, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
        cudaErrorInvalidValue);
  }
}

TEST(AttentionMemory, GrowsLinearlyWithTheSequence) {
  const auto bytes = [](std::size_t length) {
    return attention_scratch_bytes({1, length, 4, 2, 64}, 2);
  };
  EXPECT_EQ(bytes(8192), 2 * bytes(4096));
  EXPECT_LE(bytes(8192), 8192U * 4 * 8);
}

}  // namespace
}  // namespace ballast::model::cuda::attention_test
