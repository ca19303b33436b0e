#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

#include "tests/unit/model/fixture.h"

// A vocabulary in tiles: every order of visits gives the same bits, and tiles give the results of
// the whole vocabulary.

namespace ballast::model::vocabulary_test {
namespace {

using Values = std::vector<double>;

using test::OutputTile;

constexpr MicroBatchShape kShape = {3, 21};
constexpr float kScale = 0.5F;

/// Results of a training step of embedding and head. Those of tiles are joined.
struct Results {
  Values embedded;
  Values dx;
  double loss = 0.0;
  Values norm_gradient;
  Values output_gradient;     ///< [V, H]
  Values embedding_gradient;  ///< [V, H], followed by that of the positions
  friend bool operator==(const Results&, const Results&) = default;
};

enum class Visits { one_pass, by_tiles };

class Step {
 public:
  Step(const ModelConfig& config, DType type) : b_(config, type, kShape) {
    tokens_ = b_.upload_tokens(b_.tokens(3));
    slots_ = b_.upload_tokens(rows_in_tiles(b_.tokens(3)));
    std::vector<std::int32_t> targets = b_.tokens(4);
    for (std::size_t i = 0; i < targets.size(); i += 7) targets[i] = -1;
    targets_ = b_.upload_tokens(targets);
    in_ = b_.upload(b_.activation_values(9));
    const Architecture& model = b_.architecture;
    // Values equal to the rows of an uncut model.
    const Values matrix = test::normals(model.config.vocab_size * width(), 77, 0.2);
    for (const BlockSpec& block : model.blocks) {
      Values flat(block.elements, 0.0);
      for (const TensorSpec& tensor : block.tensors) {
        const bool rows = tensor.rows_in_all == model.config.vocab_size;
        const Values own = test::normals(tensor.size, 5, 0.2, 1.0);
        for (std::size_t i = 0; i < tensor.size; ++i) {
          flat[tensor.offset + i] = rows ? matrix[tensor.first_element() + i] : own[i];
        }
      }
      weights_.push_back(b_.upload(flat));
      gradients_.push_back(b_.gradient(block.elements));
      b_.compute->zero(*b_.stream, gradients_.back());
    }
    for (std::size_t t = 0; t < model.config.vocabulary_tiles; ++t) {
      const VocabularyTile tile = model.tile(t);
      tiles_.push_back({t, weights_[tile.block],
                        tied() ? b_.gradient(tile.rows * width()) : gradients_[tile.block]});
    }
  }

  Results train(Visits visits) {
    Results found;
    const DeviceBytes out = b_.activation();
    for (std::size_t t = 0; t < b_.architecture.first_layer(); ++t) {
      b_.kernels().embedding_forward(*b_.stream, t, weights_[t], tokens_, {}, out);
    }
    found.embedded = b_.download(out);
    const DeviceBytes dx = b_.activation();
    const auto loss = b_.number();
    if (visits == Visits::one_pass) {
      in_one_pass(dx, loss);
    } else {
      by_tiles(dx, loss);
    }
    found.loss = b_.one(loss);
    found.dx = b_.download(dx);
    for (std::size_t t = b_.architecture.first_layer(); t-- > 0;) {
      b_.kernels().embedding_backward(*b_.stream, t, tokens_, slots_, {}, dx, gradients_[t]);
    }
    b_.stream->synchronize();
    collect(found);
    return found;
  }

  double evaluate() {
    const auto loss = b_.number();
    const DeviceBytes rows = begin_and_scan();
    b_.kernels().head_end(*b_.stream, norm_weights(), in_, targets_, rows, {}, {}, {}, loss);
    return b_.one(loss);
  }

 private:
  [[nodiscard]] std::size_t width() const { return b_.architecture.config.hidden_size; }
  [[nodiscard]] bool tied() const { return b_.architecture.config.tie_embeddings; }
  [[nodiscard]] DeviceBytes norm_weights() const { return weights_[b_.architecture.head()]; }

  /// Returns the rows of tokens in their tiles: the sum rows of sums with all rows.
  [[nodiscard]] std::vector<std::int32_t> rows_in_tiles(std::vector<std::int32_t> tokens) const {
    for (std::int32_t& token : tokens) {
      std::size_t t = b_.architecture.own_vocabulary_tiles() - 1;
      while (b_.architecture.tile(t).first > static_cast<std::uint64_t>(token)) --t;
      token -= static_cast<std::int32_t>(b_.architecture.tile(t).first);
    }
    return tokens;
  }
  void in_one_pass(DeviceBytes dx, DeviceView<double> loss) {
    const std::size_t head = b_.architecture.head();
    const Bytes bytes = b_.compute->sizes().intermediates[head];
    const DeviceBytes kept = bytes > 0 ? b_.device->allocate(bytes, "logits") : DeviceBytes();
    b_.kernels().head_train(*b_.stream, norm_weights(), tiles_, in_, targets_, kScale, dx,
                            gradients_[head], Accumulation::first, loss, kept);
  }
  DeviceBytes begin_and_scan() {
    const DeviceBytes rows = b_.device->allocate(b_.compute->sizes().rows, "rows");
    b_.kernels().normalize(*b_.stream, b_.architecture.head(), norm_weights(), in_, rows, {});
    for (const OutputTile& tile : tiles_) {
      b_.kernels().head_scan(*b_.stream, tile, targets_, rows);
    }
    return rows;
  }
  /// If the vocabulary is tied, the gradients of the tiles follow in separate visits.
  void by_tiles(DeviceBytes dx, DeviceView<double> loss) {
    const std::size_t head = b_.architecture.head();
    const DeviceBytes rows = begin_and_scan();
    const auto dnormed = b_.gradient(b_.activations());
    for (std::size_t t = tiles_.size(); t-- > 0;) {
      OutputTile tile = tiles_[t];
      if (tied()) tile.gradient = {};
      b_.kernels().head_differentiate(*b_.stream, tile, targets_, kScale, rows, dnormed,
                                      Accumulation::first);
    }
    b_.kernels().head_end(*b_.stream, norm_weights(), in_, targets_, rows, dnormed, dx,
                          gradients_[head], loss);
    for (std::size_t t = tiles_.size(); tied() && t-- > 0;) {
      b_.kernels().head_differentiate(*b_.stream, tiles_[t], targets_, kScale, rows, {},
                                      Accumulation::first);
    }
  }

  void collect(Results& found) const {
    const Architecture& model = b_.architecture;
    for (std::size_t b = 0; b < model.blocks.size(); ++b) {
      if (model.blocks[b].kind == BlockKind::layer) continue;
      const Values all = b_.values(gradients_[b]);
      for (const TensorSpec& tensor : model.blocks[b].tensors) {
        Values& to = b < model.first_layer()             ? found.embedding_gradient
                     : tensor.name == model.outer.output ? found.output_gradient
                                                         : found.norm_gradient;
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
        to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(tensor.size));
      }
    }
    for (const OutputTile& tile : tiles_) {
      if (!tied()) break;
      const Values rows = b_.values(tile.gradient);
      found.output_gradient.insert(found.output_gradient.end(), rows.begin(), rows.end());
    }
  }

  test::Bench b_;
  DeviceView<std::int32_t> tokens_;
  DeviceView<std::int32_t> slots_;
  DeviceView<std::int32_t> targets_;
  DeviceBytes in_;
  std::vector<DeviceBytes> weights_;
  std::vector<DeviceView<float>> gradients_;
  std::vector<OutputTile> tiles_;
};

std::vector<ModelConfig> models() {
  std::vector<ModelConfig> list;
  for (ModelConfig config : {test::small_gpt2(), test::small_llama()}) {
    for (const bool tied : {false, true}) {
      config.tie_embeddings = tied;
      list.push_back(config);
    }
  }
  return list;
}

ModelConfig in_tiles(ModelConfig config, std::uint64_t tiles) {
  config.vocabulary_tiles = tiles;
  return config;
}

std::string name_of(const ModelConfig& config) {
  return config.family + (config.tie_embeddings ? ", tied" : "");
}

TEST(VocabularyTiles, OnePassAndVisitsGiveTheSameBits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const ModelConfig& config : models()) {
      for (const std::uint64_t tiles : {2U, 3U}) {
        const ModelConfig cut = in_tiles(config, tiles);
        const Results whole = Step(cut, type).train(Visits::one_pass);
        EXPECT_EQ(Step(cut, type).train(Visits::by_tiles), whole) << name_of(config) << tiles;
        EXPECT_EQ(Step(cut, type).evaluate(), whole.loss);
      }
    }
  }
}

double distance(const Values& one, const Values& other) {
  return one.size() == other.size() ? test::relative_error(one, other) : HUGE_VAL;
}

TEST(VocabularyTiles, EqualTheWholeVocabulary) {
  for (const ModelConfig& config : models()) {
    const Results whole = Step(in_tiles(config, 1), DType::f32).train(Visits::one_pass);
    const Results tiles = Step(in_tiles(config, 3), DType::f32).train(Visits::by_tiles);
    SCOPED_TRACE(name_of(config));
    EXPECT_EQ(tiles.embedded, whole.embedded);
    EXPECT_NEAR(tiles.loss, whole.loss, 1e-6 * whole.loss);
    EXPECT_LT(distance(tiles.dx, whole.dx), 1e-5);
    EXPECT_LT(distance(tiles.norm_gradient, whole.norm_gradient), 1e-5);
    EXPECT_LT(distance(tiles.output_gradient, whole.output_gradient), 1e-5);
    EXPECT_LT(distance(tiles.embedding_gradient, whole.embedding_gradient), 1e-5);
  }
}

TEST(VocabularyTiles, DependOnlyOnTheShape) {
  // A vocabulary of up to 2^27 elements is whole: GPT-2 and Llama 2 with 7 billion parameters.
  EXPECT_EQ(usual_vocabulary_tiles(50257, 768, 7'000'000), 1U);
  EXPECT_EQ(usual_vocabulary_tiles(32000, 4096, 202'000'000), 1U);
  // So are larger ones of up to two layers.
  EXPECT_EQ(usual_vocabulary_tiles(128256, 8192, 855'000'000), 1U);
  // Otherwise, tiles have a quarter of a layer,
  EXPECT_EQ(usual_vocabulary_tiles(128256, 4096, 218'000'000), 10U);
  // or 2^22 elements.
  EXPECT_EQ(usual_vocabulary_tiles(151936, 1024, 12'000'000), 38U);
}

TEST(VocabularyTiles, KeepInitialValuesAndPlacesInFiles) {
  ModelConfig config = test::small_gpt2();
  config.init_stddev = 0.5;
  const Architecture whole = build_architecture(config);
  const Architecture tiles = build_architecture(in_tiles(config, 3));
  const TensorSpec& table = whole.blocks[0].tensors[0];
  std::vector<float> expected(table.size);
  initialize(table, 7, 0, expected);
  std::vector<float> found;
  for (std::size_t t = 0; t < 3; ++t) {
    const TensorSpec& rows = tiles.blocks[t].tensors[0];
    EXPECT_EQ(rows.whole_shape(), table.shape);
    EXPECT_EQ(run_in_files(rows, 3).first, found.size() + 3);
    EXPECT_EQ(run_in_files(rows, 3).count, rows.size - 3);
    std::vector<float> part(rows.size);
    initialize(rows, 7, 0, part);
    found.insert(found.end(), part.begin(), part.end());
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(tiles.parameters(), whole.parameters());
}

TEST(VocabularyTiles, HaveAtLeastSixteenRowsExceptTheLast) {
  const Architecture four = build_architecture(in_tiles(test::small_gpt2(), 4));
  EXPECT_EQ(four.tile(3).first, 48U);
  EXPECT_EQ(four.tile(3).rows, 13U);
  EXPECT_THROW(build_architecture(in_tiles(test::small_gpt2(), 5)), Error);
}

TEST(VocabularyTiles, LogitsOfAChunkStayWithinTheirBounds) {
  constexpr Bytes kBound = 128 * kMiB;  // of the host device
  constexpr MicroBatchShape kLong = {.sequences = 128, .length = 64};
  ModelConfig config = test::small_llama();
  config.vocab_size = 163840;
  const auto sizes = [&](std::uint64_t tiles) {
    const Architecture model = build_architecture(in_tiles(config, tiles));
    const KernelSizes needed = kernel_memory(model, DType::bf16, kLong, "host", 1);
    return std::pair(needed.workspace, needed.intermediates[model.head()]);
  };
  const auto [whole, nothing] = sizes(1);
  EXPECT_LT(whole, kBound + 8 * kMiB);
  EXPECT_EQ(nothing, 0U);
  // One pass over ten tiles keeps four times as many logits as fit the bound, visits a tenth of
  // them.
  const auto [visits, one_pass] = sizes(10);
  EXPECT_LT(visits, kBound);
  EXPECT_GT(one_pass, 3 * kBound);
  EXPECT_LT(one_pass, 4 * kBound + 8 * kMiB);
}

}  // namespace
}  // namespace ballast::model::vocabulary_test
