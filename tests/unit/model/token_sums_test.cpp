#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"

#include "tests/support/expanded_sums.h"
#include "tests/unit/model/fixture.h"

// The gradient of the embedding, whose sums have rows only for the tokens of a step.

namespace ballast::model::token_sums_test {
namespace {

using test::Bench;

constexpr MicroBatchShape kShape = {2, 9};
constexpr std::size_t kMicroBatches = 3;

TEST(SumRows, AreNumberedByTileInTheOrderOfTheTokens) {
  ModelConfig config = test::small_llama();
  config.vocabulary_tiles = 2;
  const Architecture model = build_architecture(config);
  const auto second = static_cast<std::int32_t>(model.tile(1).first);
  const std::vector<std::int32_t> tokens = {7, second, 7, 0, second + 5, second, -1, 1000};
  EXPECT_EQ(number_sum_rows(model, tokens), (std::vector<std::int32_t>{0, 0, 0, 1, 1, 0, 0, 0}));
}

TEST(SumRows, APadTokenHasNone) {
  ModelConfig config = test::small_llama();
  EXPECT_EQ(pad_token(config), std::nullopt);
  config.details[kPadToken] = 7;
  const Architecture model = build_architecture(config);
  EXPECT_EQ(pad_token(model.config), 7);
  EXPECT_EQ(number_sum_rows(model, std::vector<std::int32_t>{3, 7, 5, 3, 7}),
            (std::vector<std::int32_t>{0, kPadSumRow, 1, 0, kPadSumRow}));
}

TEST(SumRows, AreAtMostTheRowsOfATile) {
  const Architecture model = build_architecture(test::small_gpt2());
  const BlockSpec& block = model.blocks.front();
  const std::uint64_t width = model.config.hidden_size;
  const Elems rest = TokenSums(model, block).rest;
  EXPECT_EQ(TokenSums(model, block).table + rest, block.elements);
  EXPECT_EQ(elements_of_sum(model, block, 5), round_up(5 * width, 16) + rest);
  EXPECT_EQ(elements_of_sum(model, block, 1000), round_up(61 * width, 16) + rest);
  EXPECT_EQ(elements_of_sum(model, model.blocks[1], 5), model.blocks[1].elements);
}

constexpr std::int32_t kPad = 2;

struct Case {
  std::string family;
  bool tied = false;
  std::uint64_t tiles = 1;
  std::uint64_t vocabulary = 61;
  bool pads = false;  ///< token 2, which is in all micro-batches, is the pad token
};

class PackedTokenSums : public testing::TestWithParam<std::tuple<Case, DType>> {
 protected:
  PackedTokenSums() : b_(config(), std::get<DType>(GetParam()), kShape) {
    // Tokens repeat in a micro-batch and between micro-batches, and most rows have none.
    for (std::uint64_t m = 0; m < kMicroBatches; ++m) {
      std::vector<std::int32_t> tokens = b_.tokens(3 + m);
      tokens[1] = tokens[5] = kPad;
      tokens[3] = static_cast<std::int32_t>(b_.architecture.config.vocab_size - 1);
      tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    }
    slots_ = number_sum_rows(b_.architecture, tokens_);
    for (std::uint64_t m = 0; m < kMicroBatches; ++m) {
      batches_.push_back({.tokens = part(tokens_, m), .sum_rows = part(slots_, m)});
      dy_.push_back(b_.activation_values(20 + m));
    }
  }

  static ModelConfig config() {
    const Case& wanted = std::get<Case>(GetParam());
    ModelConfig config = wanted.family == "gpt2" ? test::small_gpt2() : test::small_llama();
    config.tie_embeddings = wanted.tied;
    config.vocabulary_tiles = wanted.tiles;
    config.vocab_size = wanted.vocabulary;
    if (wanted.pads) config.details[kPadToken] = kPad;
    return config;
  }
  DeviceView<const std::int32_t> part(const std::vector<std::int32_t>& ids, std::size_t micro) {
    const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(micro * kShape.tokens());
    return b_.upload_tokens({begin, begin + static_cast<std::ptrdiff_t>(kShape.tokens())});
  }

  /// Returns the sums of a block after all micro-batches.
  DeviceView<float> add_up(std::size_t block) {
    const BlockSpec& about = b_.architecture.blocks[block];
    const auto sums = b_.gradient(
        std::vector<float>(elements_of_sum(b_.architecture, about, tokens_.size()), 7.0F));
    b_.compute->clear_gradient(*b_.stream, block, sums);
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
      b_.kernels().embedding_backward(*b_.stream, block, batches_[m].tokens, batches_[m].sum_rows,
                                      {}, b_.upload(dy_[m]), sums);
    }
    return sums;
  }
  /// Returns the gradient of a block without sum rows.
  [[nodiscard]] std::vector<float> dense(std::size_t block) const {
    const BlockSpec& about = b_.architecture.blocks[block];
    const std::size_t width = b_.architecture.config.hidden_size;
    const TensorSpec& table = about.tensor(b_.architecture.outer.tokens);
    std::vector<float> sums(about.elements);
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const double* const row = dy_[i / kShape.tokens()].data() + i % kShape.tokens() * width;
      const auto add = [&](std::size_t to) {
        for (std::size_t c = 0; c < width; ++c) sums[to + c] += static_cast<float>(row[c]);
      };
      const std::uint64_t at = static_cast<std::uint64_t>(tokens_[i]) - table.first_row;
      const bool pads = tokens_[i] == pad_token(b_.architecture.config);
      if (at < table.shape.front() && !pads) add(at * width);
      if (about.tensors.size() > 1) {
        add(about.tensors[1].offset + i % kShape.length * width);
      }
    }
    return sums;
  }

  Bench b_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> slots_;
  std::vector<BatchViews> batches_;
  std::vector<std::vector<double>> dy_;  ///< by micro-batch
};

TEST_P(PackedTokenSums, HaveTheBitsOfSumsWithAllRows) {
  const Architecture& model = b_.architecture;
  const DType type = std::get<DType>(GetParam());
  for (std::size_t block = 0; block < model.first_layer(); ++block) {
    SCOPED_TRACE(block);
    const BlockSpec& about = model.blocks[block];
    const DeviceView<float> sums = add_up(block);
    const std::vector<float> expected = dense(block);
    EXPECT_EQ(test::expanded_sums(model, about, tokens_, slots_, b_.get(sums)), expected);

    const Elems matrix = about.tensors.front().size;
    const auto tied = test::normals<float>(matrix, 40 + block);
    const auto by_head = model.config.tie_embeddings ? b_.gradient(tied) : DeviceView<float>();
    const DeviceBytes packed = b_.device->allocate(about.elements * size_of(type), "packed");
    const auto stats = view_as<GradientStats>(b_.device->allocate(sizeof(GradientStats), "stats"));
    b_.compute->pack_gradient(*b_.stream, block,
                              {.own = sums, .tied = by_head, .batches = batches_}, packed, stats);
    b_.stream->synchronize();
    const std::vector<double> found = b_.download(packed);
    double squares = 0.0;
    for (Elems i = 0; i < about.elements; ++i) {
      const float sum = i < by_head.size() ? expected[i] + tied[i] : expected[i];
      const float rounded = with_training_type(
          type, [&](auto of_type) { return to_float(from_float<decltype(of_type)>(sum)); });
      ASSERT_EQ(found[i], static_cast<double>(rounded)) << i;
      squares += found[i] * found[i];
    }
    EXPECT_NEAR(b_.one(stats).sum_of_squares, squares, 1e-12 * squares);
    EXPECT_EQ(b_.one(stats).non_finite, 0U);
  }
}

/// The large vocabularies have several chunks of statistics, some without a token.
INSTANTIATE_TEST_SUITE_P(
    Models, PackedTokenSums,
    testing::Combine(testing::Values(Case{"gpt2", true}, Case{"gpt2", false, 2},
                                     Case{"gpt2", true, 3, 200}, Case{"llama", true, 2},
                                     Case{"llama", false}, Case{"gpt2", true, 1, 9000},
                                     Case{"llama", false, 1, 9000},
                                     Case{"llama", true, 2, 61, true},
                                     Case{"llama", false, 1, 9000, true}),
                     testing::Values(DType::f32, DType::bf16, DType::f16)),
    [](const auto& info) {
      const Case& of = std::get<Case>(info.param);
      return of.family + (of.tied ? "_tied_" : "_") + std::to_string(of.tiles) + "_of_" +
             std::to_string(of.vocabulary) + (of.pads ? "_padded_" : "_") +
             std::string(to_string(std::get<DType>(info.param)));
    });

}  // namespace
}  // namespace ballast::model::token_sums_test
