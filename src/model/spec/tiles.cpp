#include "src/model/spec/tiles.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/units.h"
#include "ballast/model/family.h"

namespace ballast::model {
namespace {

std::uint64_t steps_of(std::uint64_t size) {
  return (size + kTileStep - 1) / kTileStep;
}

/// Returns `tiles`, or the next number of which tensor places can share the tiles equally.
std::uint64_t shared_layer_tiles(ModelConfig c, std::uint64_t tiles, std::uint64_t places) {
  if (places == 1) return tiles;
  const std::uint64_t first = round_up(tiles, places);
  for (c.layer_tiles = first; c.layer_tiles < first + c.num_kv_heads * places;
       c.layer_tiles += places) {
    if (attention_tiles(c) % places == 0) return c.layer_tiles;
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

void complete_layer_tiles(ModelConfig& c, const Family& described, std::uint64_t places,
                          const Refuse& refuse) {
  const bool cuts = described.cuts_layers(c, places);
  if (c.layer_tiles == 0) {
    const Elems layer = cuts ? described.layer(c, 0).elements : 0;
    const std::uint64_t usual = usual_layer_tiles(layer, c.num_layers);
    c.layer_tiles = shared_layer_tiles(c, std::min(usual, steps_of(c.intermediate_size)), places);
  }
  if (c.layer_tiles == 1) return;
  if (!cuts) {
    refuse("layer_tiles", fmt::format("layers of this {} model cannot be cut into tiles, because "
                                      "{}; set it to 1",
                                      c.family, described.obstacle_to_tiles(c, places)));
  }
  const std::uint64_t most = steps_of(c.intermediate_size);
  if (c.layer_tiles <= most) return;
  refuse("layer_tiles", fmt::format("intermediate_size {} allows at most {} tiles of {}, got {}",
                                    c.intermediate_size, most, kTileStep, c.layer_tiles));
}

/// Size of the largest block of a layer, in elements.
Elems largest_block(const ModelConfig& c, const RankSplit& split) {
  Elems largest = 0;
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    for (const BlockSpec& block : layer_blocks(c, index, {.experts = split.experts})) {
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
  const Family& described = family(c.family);
  std::size_t count = 0;
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    const std::uint64_t experts = described.experts_of_layer(c, index);
    const std::uint64_t all = described.count_blocks_of_layer(c, index);
    const std::uint64_t tiles =
        split.tensor == 1 ? 0 : attention_tiles(c) + c.layer_tiles;  // models without experts
    count += all - experts + experts / split.experts - tiles + tiles / split.tensor;
  }
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
  const Family& described = family(config.family);
  complete_layer_tiles(config, described, split.tensor, refuse);
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
  constexpr std::uint64_t kMost = 64;
  constexpr std::uint64_t kInAll = 512;
  constexpr std::uint64_t kLeast = 4;
  if (layer <= kUncut) return 1;
  // About two thirds of a layer are its MLP.
  return std::min((layer * 2 / 3 + kTile - 1) / kTile,
                  std::clamp(kInAll / std::max(layers, std::uint64_t{1}), kLeast, kMost));
}

std::uint64_t tiles_of_heads(std::uint64_t heads, std::uint64_t most) {
  std::uint64_t tiles = std::min(heads, most);
  while (heads % tiles != 0) --tiles;
  return tiles;
}

std::uint64_t attention_tiles(const ModelConfig& config, std::uint64_t layer) {
  return tiles_of_heads(family(config.family).heads_of_keys(config, layer), config.layer_tiles);
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

std::size_t Family::count_blocks_of_layer(const ModelConfig& config, std::uint64_t index) const {
  return config.layer_tiles == 1 ? 1 : 2 + attention_tiles(config, index) + config.layer_tiles;
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

}  // namespace ballast::model
