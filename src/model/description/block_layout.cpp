#include "ballast/model/block_layout.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {

BlockBuilder::BlockBuilder(BlockKind kind, std::string name, std::string prefix) {
  block_.kind = kind;
  block_.name = std::move(name);
  block_.prefix = std::move(prefix);
}

BlockBuilder& BlockBuilder::add(std::string_view name, std::vector<std::uint64_t> shape, Init init,
                                double stddev) {
  TensorSpec tensor;
  tensor.name = block_.prefix + std::string(name);
  tensor.size = 1;
  for (const std::uint64_t extent : shape) tensor.size *= extent;
  tensor.shape = std::move(shape);
  tensor.rows_in_all = tensor.shape.front();
  tensor.columns_in_all = tensor.size / tensor.shape.front();
  tensor.offset = block_.elements;
  tensor.init = init;
  tensor.stddev = stddev;
  block_.parameters += tensor.size;
  block_.elements += round_up(tensor.size, kTensorStep);
  if (block_.kind == BlockKind::layer && tensor.shape.size() == 2) {
    block_.product_elements += tensor.size;
  }
  block_.tensors.push_back(std::move(tensor));
  return *this;
}

BlockBuilder& BlockBuilder::add_last_product(std::string_view name,
                                             std::vector<std::uint64_t> shape, double stddev) {
  add(name, std::move(shape), Init::normal, stddev);
  block_.last_product_elements += block_.tensors.back().size;
  return *this;
}

BlockBuilder& BlockBuilder::add_buffer(std::string_view name, std::uint64_t size, Init init) {
  add(name, {kAddends * size}, init);
  TensorSpec& tensor = block_.tensors.back();
  tensor.rows_in_all = size;
  tensor.stored.addends = kAddends;
  tensor.frozen = true;
  tensor.buffer = true;
  block_.parameters -= tensor.size - size;
  return *this;
}

BlockBuilder& BlockBuilder::add_norm(const NormSpec& norm, std::uint64_t width) {
  if (norm.name.empty()) return *this;
  add(norm.name + ".weight", {width}, norm.offset != 0.0F ? Init::zeros : Init::ones);
  if (norm.layer_norm && norm.biased) add(norm.name + ".bias", {width}, Init::zeros);
  return *this;
}

BlockBuilder& BlockBuilder::add_repeated_products(Elems elements) {
  block_.product_elements += elements;
  block_.repeated_product_elements += elements;
  return *this;
}

BlockBuilder& BlockBuilder::repeated() {
  block_.repeated_product_elements += block_.tensors.back().size;
  return *this;
}

BlockBuilder& BlockBuilder::attend(std::uint64_t width, std::uint64_t window) {
  block_.attention_width = width;
  block_.attention_window = window;
  return *this;
}

BlockBuilder& BlockBuilder::recur(std::uint64_t width, std::uint64_t products) {
  block_.attention_width = width;
  block_.recurrent_products = products;
  return *this;
}

BlockBuilder& BlockBuilder::stored_by(const StoredRows& rows, std::uint64_t index) {
  for (auto tensor = block_.tensors.rbegin(); tensor != block_.tensors.rend(); ++tensor) {
    const bool matrix = tensor->shape.size() == 2;
    const std::uint64_t own_rows = tensor->shape.front();
    expects(own_rows % (rows.parts * rows.groups) == 0,
            "the rows of a tensor are not parts of groups");
    tensor->stored = rows;
    tensor->stored.as_columns = rows.as_columns && matrix;
    if (rows.stacked > 0) {
      tensor->rows_in_all = rows.stacked * own_rows;
      tensor->first_row = index * own_rows;
    }
    if (matrix) return *this;
  }
  return *this;
}

BlockBuilder& BlockBuilder::as_row() {
  block_.tensors.back().stored.as_row = true;
  return *this;
}

BlockBuilder& BlockBuilder::rows_of(std::uint64_t rows_in_all, std::uint64_t first_row) {
  TensorSpec& tensor = block_.tensors.back();
  tensor.rows_in_all = rows_in_all;
  tensor.first_row = first_row;
  return *this;
}

BlockBuilder& BlockBuilder::columns_of(std::uint64_t columns_in_all, std::uint64_t first_column) {
  TensorSpec& tensor = block_.tensors.back();
  expects(tensor.shape.size() == 2, "only matrices have columns");
  tensor.columns_in_all = columns_in_all;
  tensor.first_column = first_column;
  return *this;
}

BlockBuilder& BlockBuilder::table() {
  TensorSpec& tensor = block_.tensors.back();
  tensor.table = true;
  block_.product_elements -= tensor.size;
  return *this;
}

BlockBuilder& BlockBuilder::without_prefix() {
  TensorSpec& tensor = block_.tensors.back();
  tensor.name = tensor.name.substr(block_.prefix.size());
  return *this;
}

BlockBuilder& BlockBuilder::content(BlockContent content) {
  block_.content = content;
  return *this;
}

BlockBuilder& BlockBuilder::expert(std::uint64_t number, double token_share) {
  block_.expert = number;
  block_.token_share = token_share;
  return content(BlockContent::expert);
}

BlockSpec BlockBuilder::finish() {
  block_.elements = round_up(block_.elements, kBlockStep);
  const bool has_buffers = std::any_of(block_.tensors.begin(), block_.tensors.end(),
                                       [](const TensorSpec& tensor) { return tensor.buffer; });
  if (has_buffers) arrange(block_);
  return std::move(block_);
}

namespace {

std::uint64_t steps_of(std::uint64_t size) {
  return (size + kTileStep - 1) / kTileStep;
}

/// Returns `tiles`, or the next number of which tensor places can share the tiles equally.
std::uint64_t shared_layer_tiles(const ModelConfig& c, const LayerSpec& layer, std::uint64_t tiles,
                                 std::uint64_t places) {
  if (places == 1) return tiles;
  const std::uint64_t first = round_up(tiles, places);
  for (std::uint64_t most = first; most < first + c.num_kv_heads * places; most += places) {
    if (tiles_of(layer.sublayers.front().body, most) % places == 0) return most;
  }
  return first;
}

void check_tensor_places(const ModelConfig& c, std::uint64_t places, const Refuse& refuse) {
  const auto require = [&](std::string_view key, std::uint64_t tiles, const std::string& what) {
    if (tiles % places == 0) return;
    refuse(key, fmt::format("tensor_parallel.autotp_size {} does not divide the {} {}", places,
                            tiles, what));
  };
  require("layer_tiles", c.layer_tiles,
          fmt::format("tiles of an MLP; give a multiple of {}, or \"auto\"", places));
  require("layer_tiles", attention_tiles(c),
          fmt::format("tiles of attention, which has {} heads of keys", c.num_kv_heads));
  require("vocabulary_tiles", c.vocabulary_tiles,
          fmt::format("tiles of the vocabulary; give a multiple of {}, or \"auto\"", places));
}

/// Returns the width of the narrowest MLP of the layers; intermediate_size if they have none.
std::uint64_t narrowest_mlp(std::span<const LayerSpec> layers, const ModelConfig& c) {
  std::uint64_t width = c.intermediate_size;
  for (const LayerSpec& layer : layers) {
    if (const auto* const mlp = layer.find<MlpSpec>()) width = std::min(width, mlp->width);
  }
  return width;
}

void complete_layer_tiles(ModelConfig& c, std::uint64_t places, const Refuse& refuse) {
  if (c.layer_tiles == 1) return;
  const std::vector<LayerSpec> layers = layers_of(c);
  const std::string obstacle = obstacle_to_tiles(layers, places);
  const std::uint64_t most = steps_of(narrowest_mlp(layers, c));
  if (c.layer_tiles == 0) {
    const Elems layer = obstacle.empty() ? blocks_of(layers.front(), c, 0).front().elements : 0;
    const std::uint64_t usual = usual_layer_tiles(layer, c.num_layers);
    c.layer_tiles = shared_layer_tiles(c, layers.front(), std::min(usual, most), places);
  }
  if (c.layer_tiles == 1) return;
  if (!obstacle.empty()) {
    refuse("layer_tiles", fmt::format("layers of this {} model cannot be cut into tiles, because "
                                      "{}; set it to 1",
                                      c.family, obstacle));
  }
  if (c.layer_tiles <= most) return;
  refuse("layer_tiles", fmt::format("intermediate_size {} allows at most {} tiles of {}, got {}",
                                    c.intermediate_size, most, kTileStep, c.layer_tiles));
}

/// Size of the largest block of a layer, in elements.
Elems largest_block(const ModelConfig& c, const RankSplit& split) {
  Elems largest = 0;
  const std::vector<LayerSpec> layers = layers_of(c);
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    for (const BlockSpec& block :
         joined_blocks_of(layers[index], c, index, {.experts = split.experts})) {
      largest = std::max(largest, block.elements);
    }
  }
  return largest;
}

void complete_vocabulary_tiles(ModelConfig& c, const RankSplit& split, const Refuse& refuse) {
  if (c.vocabulary_tiles == 0) {
    const bool small = usual_vocabulary_tiles(c.vocab_size, c.hidden_size, 0) == 1;
    const std::uint64_t usual =
        usual_vocabulary_tiles(c.vocab_size, c.hidden_size, small ? 0 : largest_block(c, split));
    c.vocabulary_tiles = round_up(usual, split.tensor);
  }
  const std::uint64_t most = steps_of(c.vocab_size);
  if (c.vocabulary_tiles <= most) return;
  refuse("vocabulary_tiles", fmt::format("{} tokens allow at most {} tiles of {} rows, got {}",
                                         c.vocab_size, most, kTileStep, c.vocabulary_tiles));
}

std::size_t blocks_of_layers(const ModelConfig& c, const RankSplit& split) {
  std::size_t count = 0;
  for (const LayerSpec& layer : layers_of(c)) count += count_blocks(layer, c, split);
  return count;
}

}  // namespace

TileRange tile_range(std::uint64_t size, std::uint64_t tiles, std::uint64_t number) {
  const auto begin = [&](std::uint64_t tile) {
    return std::min(size, steps_of(size) * tile / tiles * kTileStep);
  };
  return {begin(number), begin(number + 1) - begin(number)};
}

void complete_tiles(ModelConfig& config, const RankSplit& split, const Refuse& refuse) {
  complete_layer_tiles(config, split.tensor, refuse);
  complete_vocabulary_tiles(config, split, refuse);
  if (split.tensor > 1) check_tensor_places(config, split.tensor, refuse);
}

VocabularyTile vocabulary_tile(const ModelConfig& config, std::uint64_t number) {
  const TileRange rows = tile_range(config.vocab_size, config.vocabulary_tiles, number);
  return {rows.first, rows.size, 0};
}

std::uint64_t usual_vocabulary_tiles(std::uint64_t vocabulary, std::uint64_t width,
                                     Elems largest_block) {
  constexpr Elems kUncut = Elems{1} << 27;
  constexpr Elems kTile = Elems{1} << 22;
  const Elems elements = vocabulary * width;
  if (elements <= std::max(kUncut, 2 * largest_block)) return 1;
  const std::uint64_t rows =
      std::max(std::max(kTile, largest_block / 4) / width / kTileStep, std::uint64_t{1}) *
      kTileStep;
  return (vocabulary + rows - 1) / rows;
}

std::uint64_t usual_layer_tiles(Elems layer, std::uint64_t layers) {
  constexpr Elems kUncut = Elems{1} << 30;
  constexpr Elems kTile = Elems{1} << 25;
  constexpr std::uint64_t kMax = 64;
  constexpr std::uint64_t kInAll = 512;
  constexpr std::uint64_t kLeast = 4;
  if (layer <= kUncut) return 1;
  // About two thirds of a layer are its MLP.
  return std::min((layer * 2 / 3 + kTile - 1) / kTile,
                  std::clamp(kInAll / std::max(layers, std::uint64_t{1}), kLeast, kMax));
}

std::uint64_t tiles_of_heads(std::uint64_t heads, std::uint64_t most) {
  std::uint64_t tiles = std::min(heads, most);
  while (heads % tiles != 0) --tiles;
  return tiles;
}

std::uint64_t attention_tiles(const ModelConfig& config, std::uint64_t layer) {
  const LayerSpec spec = family(config.family).layer(config, layer);
  return tiles_of(spec.sublayers.front().body, config.layer_tiles);
}

void Family::cut_heads(ModelConfig& config) const {
  const std::uint64_t tiles = tiles_of_heads(config.num_kv_heads, config.layer_tiles);
  config.num_heads /= tiles;
  config.num_kv_heads /= tiles;
}

ModelConfig config_of_tile(const ModelConfig& config) {
  ModelConfig one = config;
  family(config.family).cut_heads(one);
  one.intermediate_size = 0;
  for (std::uint64_t t = 0; t < config.layer_tiles; ++t) {
    const TileRange range = tile_range(config.intermediate_size, config.layer_tiles, t);
    one.intermediate_size = std::max(one.intermediate_size, range.size);
  }
  one.layer_tiles = 1;
  return one;
}

VocabularyTile Architecture::tile(std::size_t number) const {
  VocabularyTile tile = vocabulary_tile(config, tensor_place * own_vocabulary_tiles() + number);
  const std::size_t first = output_blocks() == 0 ? head() : head() + 1;
  tile.block = (config.tie_embeddings ? 0 : first) + number;
  return tile;
}

std::uint64_t Architecture::largest_tile() const {
  std::uint64_t rows = 0;
  for (std::size_t t = 0; t < config.vocabulary_tiles; ++t) {
    rows = std::max(rows, vocabulary_tile(config, t).rows);
  }
  return rows;
}

bool cuts_layers(const ModelConfig& config, std::uint64_t places) {
  return obstacle_to_tiles(layers_of(config), places).empty();
}

std::size_t count_blocks(const ModelConfig& config, const RankSplit& split) {
  const std::uint64_t tiles = config.vocabulary_tiles / split.tensor;
  const bool output = !config.tie_embeddings && config.vocabulary_tiles > 1;
  return tiles + blocks_of_layers(config, split) + 1 + (output ? tiles : 0);
}

bool is_layer(const ModelConfig& config, std::size_t block, const RankSplit& split) {
  const std::uint64_t first = config.vocabulary_tiles / split.tensor;
  return block >= first && block < first + blocks_of_layers(config, split);
}

namespace {

/// Sums of positions begin on a cache line.
constexpr Elems kAlignment = kCacheLine / sizeof(float);

const TensorSpec* trained_tensor(const BlockSpec& block, const std::string& name) {
  const TensorSpec* const tensor = name.empty() ? nullptr : block.find(name);
  return tensor == nullptr || tensor->frozen ? nullptr : tensor;
}

/// Returns the trained table of an embedding block, or nullptr.
const TensorSpec* trained_table(const Architecture& model, const BlockSpec& block) {
  return block.kind == BlockKind::embedding ? trained_tensor(block, model.outer.tokens) : nullptr;
}

}  // namespace

bool has_token_sums(const Architecture& model, const BlockSpec& block) {
  return trained_table(model, block) != nullptr;
}

TokenSums::TokenSums(const Architecture& model, const BlockSpec& block) {
  if (!has_token_sums(model, block)) return;
  const TensorSpec* const positions = trained_tensor(block, model.outer.positions);
  const Elems all = block.own_trained_elements();
  table = positions == nullptr ? all : positions->offset;
  rest = all - table;
}

Elems elements_of_sum(const Architecture& model, const BlockSpec& block, std::uint64_t tokens) {
  if (block.kind != BlockKind::embedding) return block.own_trained_elements();
  Elems largest = 0;
  for (std::uint64_t p = 0; p < block.pieces; ++p) {
    const BlockSpec own = piece_of(block, p);
    const TensorSpec* const table = trained_table(model, own);
    if (table == nullptr) return own.trained_elements();
    const Elems sum_rows = std::min(table->shape.front(), tokens) * table->shape.back();
    largest = std::max(largest, round_up(sum_rows, kAlignment) + TokenSums(model, own).rest);
  }
  return largest;
}

std::optional<std::int32_t> pad_token(const ModelConfig& config) {
  const auto found = config.details.find(kPadToken);
  if (found == config.details.end()) return {};
  const auto token = found->second.whole();
  return token ? std::optional(static_cast<std::int32_t>(*token)) : std::nullopt;
}

std::vector<std::int32_t> number_sum_rows(const Architecture& own,
                                          std::span<const std::int32_t> tokens) {
  struct Tile {
    std::uint64_t end = 0;
    std::int32_t sum_rows = 0;
  };
  std::vector<Tile> tiles;
  for (std::size_t t = 0; t < own.own_vocabulary_tiles(); ++t) {
    const VocabularyTile tile = own.tile(t);
    tiles.push_back({tile.first + tile.rows});
  }
  const std::uint64_t first = own.tile(0).first;
  std::vector<std::int32_t> sum_row_of(tiles.back().end - first, -1);
  const std::optional<std::int32_t> pad = pad_token(own.config);
  std::vector<std::int32_t> sum_rows;
  sum_rows.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    const std::uint64_t row = static_cast<std::uint64_t>(token) - first;
    if (token == pad) {
      sum_rows.push_back(kPadSumRow);
      continue;
    }
    if (row >= sum_row_of.size()) {
      sum_rows.push_back(0);
      continue;
    }
    std::int32_t& sum_row = sum_row_of[row];
    if (sum_row < 0)
      sum_row = std::ranges::upper_bound(tiles, first + row, {}, &Tile::end)->sum_rows++;
    sum_rows.push_back(sum_row);
  }
  return sum_rows;
}

}  // namespace ballast::model
