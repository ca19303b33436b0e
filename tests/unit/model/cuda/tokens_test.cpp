#include "src/model/cuda/tokens/tokens.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "tests/support/device_array.h"
#include "tests/support/documents.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"

namespace ballast::model::cuda::tokens_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::must;
using test::same_bits;

template <class T>
class Tokens : public test::Kernels {};
using Types = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(Tokens, Types);
using CheckTokens = test::Kernels;
using SumLosses = test::Kernels;
float value_of(float value) {
  return value;
}
float value_of(Bf16 value) {
  return to_float(value);
}
template <class T>
T rounded(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return to_bf16(value);
  }
}
/// Values of many magnitudes, so that a different order of a sum is detected.
template <class T>
std::vector<T> random_values(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<T> values(size);
  for (T& value : values) {
    const double unit = static_cast<double>(random()) * 0x1p-31 - 1.0;
    value = rounded<T>(static_cast<float>(std::ldexp(unit, static_cast<int>(random() % 8U))));
  }
  return values;
}
/// `count` tokens, some of them frequent.
std::vector<std::int32_t> random_tokens(std::size_t count, std::uint32_t vocabulary,
                                        std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> tokens(count);
  for (std::int32_t& token : tokens) {
    token = static_cast<std::int32_t>(random() % (random() % 3 == 0 ? 3 : vocabulary));
  }
  return tokens;
}

std::uint32_t first_bad_of(const std::vector<std::int32_t>& tokens, std::size_t vocabulary,
                           std::uint32_t before, std::int32_t least = 0) {
  const DeviceArray<std::int32_t> in(tokens);
  return in_every_order([&] {
    const DeviceArray<std::uint32_t> first(1, before);
    must(check_tokens(nullptr, in.data(), in.size(), least, vocabulary, first.data()));
    return first.get();
  })[0];
}

TEST_F(CheckTokens, FindsTheFirstBadOneUnlessAnEarlierOneIsKnown) {
  constexpr std::uint32_t kNone = 1000000;
  std::vector<std::int32_t> tokens(1000, 60);
  EXPECT_EQ(first_bad_of(tokens, 61, kNone), kNone);
  EXPECT_EQ(first_bad_of(tokens, 60, kNone), 0U);
  tokens[999] = 61;
  EXPECT_EQ(first_bad_of(tokens, 61, kNone), 999U);
  tokens[500] = std::numeric_limits<std::int32_t>::min();
  tokens[501] = -1;
  EXPECT_EQ(first_bad_of(tokens, 61, kNone), 500U);
  EXPECT_EQ(first_bad_of(tokens, 61, 17), 17U);
  EXPECT_EQ(first_bad_of(tokens, 61, kNone, -1), 500U);
  EXPECT_EQ(first_bad_of(tokens, 61, kNone, std::numeric_limits<std::int32_t>::min()), 999U);
  EXPECT_EQ(first_bad_of({}, 61, 17), 17U);
}

/// Extents and contents of an embedding. Sum rows are rows of tiles.
template <class T>
struct Table {
  std::size_t vocabulary = 37;
  std::size_t width = 0;
  std::size_t length = 0;
  std::vector<std::int32_t> tokens = {};
  std::vector<std::int32_t> places = {};  ///< positions of the tokens; empty: in their sequences
  std::vector<T> table = {};
  std::vector<T> positions = {};
  float scale = 1.0F;             ///< factor of the rows of tokens
  std::size_t tile = vocabulary;  ///< rows that are embedded at once
  bool apart = false;             ///< whether tiles are on several places, whose outputs are added

  Table(std::size_t width_, std::size_t sequences, std::size_t length_)
      : width(width_),
        length(length_),
        tokens(random_tokens(sequences * length, 37, 1)),
        table(random_values<T>(vocabulary * width, 2)),
        positions(random_values<T>((length + 3) * width, 3)) {}

  [[nodiscard]] std::size_t position(std::size_t at) const {
    return places.empty() ? at % length : static_cast<std::size_t>(places[at]);
  }
  [[nodiscard]] EmbeddingExtents extents() const { return {tokens.size(), length, width}; }
};
template <class T>
Table<T> packed(Table<T> table) {
  table.places = test::packed_positions(table.tokens.size() / table.length, table.length);
  return table;
}
template <class T>
struct UploadedIds {
  DeviceArray<std::int32_t> tokens;
  DeviceArray<std::int32_t> places;
  DeviceArray<std::int32_t> sum_rows;
  Ids ids;
  explicit UploadedIds(const Table<T>& of)
      : tokens(of.tokens),
        places(of.places),
        sum_rows(of.tokens),
        ids{tokens.data(), of.places.empty() ? nullptr : places.data(), sum_rows.data()} {
    std::vector<std::int32_t> rows = of.tokens;
    for (std::int32_t& row : rows) row %= static_cast<std::int32_t>(of.tile);
    sum_rows.set(rows);
  }
};

template <class T>
std::vector<T> embedded(const Table<T>& from, bool with_positions) {
  const DeviceArray<T> table(from.table);
  const DeviceArray<T> positions(from.positions);
  const UploadedIds<T> uploaded(from);
  return in_every_order([&] {
    const DeviceArray<T> out(from.tokens.size() * from.width, rounded<T>(-7.0F));
    std::vector<T> sums(from.tokens.size() * from.width, rounded<T>(-0.0F));
    for (std::size_t first = 0; first < from.vocabulary; first += from.tile) {
      const bool last = first + from.tile >= from.vocabulary;
      must(embed<T>(
          nullptr,
          {table.data() + first * from.width, with_positions && last ? positions.data() : nullptr,
           from.scale, first, std::min(from.tile, from.vocabulary - first),
           from.tile < from.vocabulary, from.apart},
          uploaded.ids, from.extents(), out.data()));
      const std::vector<T> terms = out.get();
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] = rounded<T>(value_of(sums[i]) + value_of(terms[i]));
      }
    }
    return from.apart ? sums : out.get();
  });
}

TYPED_TEST(Tokens, EmbeddingAddsTokenAndPosition) {
  // A part of a warp, and more pieces than a block has threads.
  for (const std::size_t width : {std::size_t{8}, std::size_t{40}, std::size_t{1048}}) {
    Table<TypeParam> from(width, 3, 7);
    if (width == 40) from = packed(from);
    for (const bool with_positions : {false, true}) {
      const std::vector<TypeParam> out = embedded(from, with_positions);
      for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t at = i / width;
        const auto token = static_cast<std::size_t>(from.tokens[at]);
        float expected = value_of(from.table[token * width + i % width]);
        if (with_positions) {
          expected += value_of(from.positions[from.position(at) * width + i % width]);
        }
        ASSERT_EQ(value_of(out[i]), value_of(rounded<TypeParam>(expected))) << width << ", " << i;
      }
    }
  }
}

TYPED_TEST(Tokens, EmbeddingScalesTokens) {
  Table<TypeParam> from(40, 3, 7);
  from.scale = 7.5F;
  const std::vector<TypeParam> out = embedded(from, false);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto token = static_cast<std::size_t>(from.tokens[i / 40]);
    const float expected = value_of(from.table[token * 40 + i % 40]) * from.scale;
    ASSERT_EQ(value_of(out[i]), value_of(rounded<TypeParam>(expected))) << i;
  }
}

TYPED_TEST(Tokens, ATokenOutsideTheTableEmbedsAsZero) {
  Table<TypeParam> from(40, 2, 5);
  from.tokens[3] = 37;
  from.tokens[6] = -2;
  const std::vector<TypeParam> out = embedded(from, false);
  for (const std::size_t at : {std::size_t{3}, std::size_t{6}}) {
    for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(value_of(out[at * 40 + i]), 0.0F);
  }
}

using Gradients = std::tuple<std::vector<float>, std::vector<float>>;

template <class T>
Gradients gradients(const Table<T>& from, const std::vector<T>& dy, bool with_positions) {
  const UploadedIds<T> uploaded(from);
  const DeviceArray<T> out(dy);
  return in_every_order([&] {
    const DeviceArray<float> table(random_values<float>(from.table.size(), 5));
    const DeviceArray<float> positions(random_values<float>(from.positions.size(), 6));
    const DeviceArray<std::uint32_t> links(2 * from.tokens.size(), 0xdeadbeefU);
    for (std::size_t first = 0; first < from.vocabulary; first += from.tile) {
      const bool last = first + from.tile >= from.vocabulary;
      must(embed_backward<T>(
          nullptr, uploaded.ids, out.data(), from.extents(),
          {table.data() + first * from.width, with_positions && last ? positions.data() : nullptr,
           from.scale, first, std::min(from.tile, from.vocabulary - first)},
          links.data()));
    }
    return Gradients(table.get(), positions.get());
  });
}

/// Sums in the same order, so with the same bits.
template <class T>
Gradients expected_gradients(const Table<T>& from, const std::vector<T>& dy, bool with_positions) {
  auto table = random_values<float>(from.table.size(), 5);
  auto positions = random_values<float>(from.positions.size(), 6);
  for (std::size_t at = 0; at < from.tokens.size(); ++at) {
    const std::int32_t token = from.tokens[at];
    const bool in = token >= 0 && static_cast<std::size_t>(token) < from.vocabulary;
    for (std::size_t i = 0; i < from.width; ++i) {
      const float value = value_of(dy[at * from.width + i]);
      if (in) table[static_cast<std::size_t>(token) * from.width + i] += value * from.scale;
      if (with_positions) positions[from.position(at) * from.width + i] += value;
    }
  }
  return {table, positions};
}

template <class T>
void expect_gradients(const Table<T>& from, bool with_positions) {
  const std::vector<T> dy = random_values<T>(from.tokens.size() * from.width, 4);
  EXPECT_TRUE(
      same_bits(gradients(from, dy, with_positions), expected_gradients(from, dy, with_positions)))
      << from.tokens.size() << " tokens, width " << from.width;
}

TAG_TESTS("small_shapes", "Tokens*.Grad*");
/// A power of two, whose products with bf16 are exact, fused or not.
TYPED_TEST(Tokens, GradientsOfScaledTokensAreScaled) {
  Table<TypeParam> from(40, 3, 7);
  from.scale = 8.0F;
  expect_gradients(from, false);
}

TYPED_TEST(Tokens, TilesEmbedLikeTheWholeTable) {
  Table<TypeParam> from(40, 3, 7);
  std::fill_n(from.table.begin(), from.table.size() / 2, rounded<TypeParam>(-0.0F));
  for (const bool with_positions : {false, true}) {
    from.scale = with_positions ? 1.0F : 7.5F;
    from.tile = from.vocabulary;
    const std::vector<TypeParam> whole = embedded(from, with_positions);
    from.tile = 16;
    for (const bool apart : {true, false}) {
      from.apart = apart;
      EXPECT_TRUE(same_bits(embedded(from, with_positions), whole)) << with_positions << apart;
    }
    from.scale = 8.0F;  // a power of two, whose products with bf16 are exact, fused or not
    expect_gradients(from, with_positions);
  }
}

TYPED_TEST(Tokens, GradientsAreAddedInTokenOrder) {
  for (const bool with_positions : {false, true}) {
    expect_gradients(Table<TypeParam>(8, 1, 1), with_positions);
    expect_gradients(Table<TypeParam>(40, 5, 41), with_positions);
    expect_gradients(Table<TypeParam>(1048, 2, 3), with_positions);
  }
  expect_gradients(packed(Table<TypeParam>(40, 5, 41)), true);
  // Fewer tokens than one sequence.
  Table<TypeParam> from(8, 1, 40);
  from.tokens.resize(33);
  expect_gradients(from, true);
}

TYPED_TEST(Tokens, LinksReachFromTileToTile) {
  // Tiles of the search have 2048 tokens and start at the first token of each block.
  Table<TypeParam> from(8, 1, 4500);
  std::fill(from.tokens.begin(), from.tokens.end(), 1);
  for (const std::size_t at : {0U, 31U, 2047U, 2048U, 4499U}) from.tokens[at] = 5;
  for (const std::size_t at : {64U, 64U + 2048U}) from.tokens[at] = 6;
  for (const std::size_t at : {65U, 64U + 2047U, 64U + 4096U}) from.tokens[at] = 7;
  expect_gradients(from, false);
}

TYPED_TEST(Tokens, TokensOutsideTheTableTouchNothing) {
  Table<TypeParam> from(40, 2, 5);
  for (const std::size_t at : {1U, 4U, 8U}) from.tokens[at] = 37;
  for (const std::size_t at : {0U, 9U}) from.tokens[at] = -1;
  expect_gradients(from, true);
}

/// Values after the vocabulary must not matter.
std::vector<float> random_logits(std::size_t rows, std::size_t stride, std::size_t vocabulary) {
  std::vector<float> logits = random_values<float>(rows * stride, 11);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] /= 8.0F;
    if (i % stride >= vocabulary) logits[i] = i % 2 == 0 ? NAN : 1e30F;
  }
  return logits;
}

template <class T>
struct Entropy {
  std::vector<double> losses;
  std::vector<float> logits;  ///< the content after the call

  /// Element of a row of gradients.
  [[nodiscard]] float gradient(std::size_t row, std::size_t stride, std::size_t i) const {
    return value_of(reinterpret_cast<const T*>(logits.data() + row * stride)[i]);
  }
};

/// `tile`: number of tokens per tile. Each tile's gradients begin where its logits did.
template <class T>
Entropy<T> entropy(const std::vector<float>& logits, std::size_t stride, std::size_t vocabulary,
                   const std::vector<std::int32_t>& targets, float scale, std::size_t tile = 0) {
  const DeviceArray<std::int32_t> wanted(targets);
  const std::size_t rows = targets.size();
  const std::size_t step = tile == 0 ? vocabulary : tile;
  auto [losses, left] = in_every_order([&] {
    const DeviceArray<float> values(logits);
    const DeviceArray<double> out(rows, -1.0);
    const DeviceArray<RowSum<float>> sums(std::vector<RowSum<float>>(rows, {7.0F, 7.0F, 7.0}));
    std::vector<LogitTile> tiles;
    for (std::size_t first = 0; first < vocabulary; first += step) {
      tiles.push_back(
          {values.data() + first, rows, stride, first, std::min(step, vocabulary - first)});
      must(sum_logits(nullptr, tiles.back(), wanted.data(), first == 0, sums.data()));
    }
    must(row_losses(nullptr, sums.data(), wanted.data(), rows, out.data()));
    if (scale != 0.0F) {
      for (const LogitTile& one : tiles) {
        must(logit_gradients<T>(nullptr, one, wanted.data(), scale, nullptr, sums.data()));
      }
    }
    return std::tuple(out.get(), values.get());
  });
  return {losses, left};
}

/// The result for one row, in double.
struct Softmax {
  double largest = -HUGE_VAL;
  double total = 0.0;
  Softmax(const float* row, std::size_t vocabulary) {
    for (std::size_t i = 0; i < vocabulary; ++i) {
      largest = std::max(largest, static_cast<double>(row[i]));
    }
    for (std::size_t i = 0; i < vocabulary; ++i) total += std::exp(row[i] - largest);
  }
  [[nodiscard]] double loss(double wanted) const { return std::log(total) + largest - wanted; }
  [[nodiscard]] double gradient(double logit, bool is_target, double scale) const {
    const double e = std::exp(logit - largest);
    return (is_target ? e - total : e) / total * scale;
  }
};

template <class T>
void expect_entropy(std::size_t rows, std::size_t vocabulary, std::size_t stride,
                    std::size_t tile = 0) {
  SCOPED_TRACE(testing::Message() << rows << " rows of " << vocabulary);
  const std::size_t step = tile == 0 ? vocabulary : tile;
  const std::vector<float> logits = random_logits(rows, stride, vocabulary);
  std::vector<std::int32_t> targets(rows);
  for (std::size_t r = 0; r < rows; ++r) {
    targets[r] =
        static_cast<std::int32_t>((vocabulary - 1) * r / std::max<std::size_t>(rows - 1, 1));
  }
  const Entropy<T> only = entropy<T>(logits, stride, vocabulary, targets, 0.0F, tile);
  EXPECT_TRUE(same_bits(only.logits, logits)) << "an evaluation leaves the logits as they were";
  constexpr float kScale = 3.0F;
  const Entropy<T> both = entropy<T>(logits, stride, vocabulary, targets, kScale, tile);
  EXPECT_EQ(both.losses, only.losses);
  const double relative = std::is_same_v<T, float> ? 4e-6 : 4.1e-3;
  for (std::size_t r = 0; r < rows; ++r) {
    const float* const row = logits.data() + r * stride;
    const auto target = static_cast<std::size_t>(targets[r]);
    const Softmax softmax(row, vocabulary);
    EXPECT_NEAR(both.losses[r], softmax.loss(row[target]), 1e-6) << r;
    for (std::size_t i = 0; i < vocabulary; ++i) {
      const double expected = softmax.gradient(row[i], i == target, kScale);
      const std::size_t first = i / step * step;
      const auto* const out = reinterpret_cast<const T*>(both.logits.data() + r * stride + first);
      ASSERT_NEAR(value_of(out[i - first]), expected, std::abs(expected) * relative + 1e-30)
          << r << ", " << i;
    }
  }
}

TYPED_TEST(Tokens, CrossEntropyIsThatOfDoublePrecision) {
  expect_entropy<TypeParam>(1, 1, 4);
  expect_entropy<TypeParam>(5, 131, 144);
  // A chunk of the block has 4096 logits: exactly one, slightly more than one, four and a part.
  expect_entropy<TypeParam>(2, 4096, 4096);
  expect_entropy<TypeParam>(2, 4097, 4100);
  expect_entropy<TypeParam>(3, 18001, 18016);
  // Uses tiles, the last of which is smaller.
  expect_entropy<TypeParam>(5, 131, 144, 48);
  expect_entropy<TypeParam>(3, 18001, 18016, 6000);
}

TYPED_TEST(Tokens, NegativeTargetsHaveNeitherLossNorGradient) {
  constexpr std::size_t kVocabulary = 131;
  constexpr std::size_t kStride = 144;
  std::vector<float> logits = random_logits(4, kStride, kVocabulary);
  logits[2 * kStride + 5] = NAN;
  const auto found = entropy<TypeParam>(logits, kStride, kVocabulary, {7, -1, -100, 130}, 2.0F);
  const auto whole = entropy<TypeParam>(logits, kStride, kVocabulary, {7, 0, 0, 130}, 2.0F);
  for (const std::size_t row : {0U, 3U}) {
    EXPECT_EQ(found.losses[row], whole.losses[row]);
    EXPECT_EQ(found.gradient(row, kStride, 9), whole.gradient(row, kStride, 9));
  }
  for (const std::size_t row : {1U, 2U}) {
    EXPECT_EQ(found.losses[row], 0.0);
    for (std::size_t i = 0; i < kVocabulary; ++i) EXPECT_EQ(found.gradient(row, kStride, i), 0.0F);
  }
}

TYPED_TEST(Tokens, TheTargetsGradientIsPreciseWhereItsProbabilityIsNearOne) {
  // p - 1 = -1e-6, which would have an error of more than 1% if p near 1 were rounded to fp32.
  constexpr std::size_t kVocabulary = 4096;
  std::vector<float> logits(kVocabulary, -22.1F);
  logits[7] = 0.0F;
  const Softmax softmax(logits.data(), kVocabulary);
  const Entropy<TypeParam> found = entropy<TypeParam>(logits, kVocabulary, kVocabulary, {7}, 1.0F);
  const double expected = softmax.gradient(0.0, true, 1.0);
  EXPECT_NEAR(found.gradient(0, kVocabulary, 7), expected, std::abs(expected) * 0.01);
  EXPECT_NEAR(found.losses[0], softmax.loss(0.0), softmax.loss(0.0) * 0.01);
}

TYPED_TEST(Tokens, LogitsOfAnySizeHaveAFiniteLossAndOthersNone) {
  constexpr std::size_t kVocabulary = 700;
  std::vector<float> logits(kVocabulary);
  for (std::size_t i = 0; i < kVocabulary; ++i) {
    logits[i] = (static_cast<float>(i) - 350.0F) * 9e35F;
  }
  logits[3] = -std::numeric_limits<float>::infinity();
  const auto loss_of = [&](std::int32_t target, float scale) {
    // In tiles, too.
    const auto losses = [&](std::size_t tile) {
      return entropy<TypeParam>(logits, kVocabulary, kVocabulary, {target}, scale, tile).losses;
    };
    const double loss = losses(0)[0];
    EXPECT_EQ(std::isnan(losses(100)[0]), std::isnan(loss)) << target;
    EXPECT_EQ(std::isinf(losses(100)[0]), std::isinf(loss)) << target;
    return loss;
  };
  EXPECT_EQ(loss_of(699, 1.0F), 0.0);
  EXPECT_NEAR(loss_of(0, 1.0F), 6.291e38, 1e33);
  EXPECT_EQ(loss_of(3, 1.0F), HUGE_VAL);
  EXPECT_TRUE(std::isnan(loss_of(700, 1.0F))) << "a target outside the vocabulary";
  EXPECT_EQ(loss_of(-1, 1.0F), 0.0) << "a target that does not count";
  logits[100] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(loss_of(699, 1.0F)));
  logits[100] = NAN;
  EXPECT_TRUE(std::isnan(loss_of(699, 1.0F)));
  std::fill(logits.begin(), logits.end(), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(loss_of(5, 1.0F)));
}

TEST_F(SumLosses, AddsThemAll) {
  for (const std::size_t count : {0U, 1U, 511U, 3000U}) {
    std::vector<double> losses(count);
    double expected = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      losses[i] = 1.0 + static_cast<double>(i * i % 1009);
      expected += losses[i];
    }
    const DeviceArray<double> in(losses);
    const auto sum = in_every_order([&] {
      const DeviceArray<double> out(1, -1.0);
      must(sum_losses(nullptr, in.data(), count, 1, out.data()));
      return out.get();
    });
    EXPECT_EQ(sum[0], expected) << count;
  }
}

}  // namespace
}  // namespace ballast::model::cuda::tokens_test
