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

void complete_layer_tiles(ModelConfig& c, const Family& described, const Refuse& refuse) {
  const bool cuts = described.cuts_layers(c);
  if (c.layer_tiles == 0) {
    const Elems layer = cuts ? described.layer(c, 0).elements : 0;
    c.layer_tiles = std::min(usual_layer_tiles(layer, c.num_layers), steps_of(c.intermediate_size));
  }
  if (c.layer_tiles == 1) return;
  if (!cuts) {
    refuse("layer_tiles",
           fmt::format("layers of this {} model cannot be cut (this needs a norm before attention "
                       "and one before the MLP, no other norm, separate maps for queries, keys, "
                       "values, gate and up, and no bias after the last maps); set it to 1",
                       c.family));
  }
  const std::uint64_t most = steps_of(c.intermediate_size);
  if (c.layer_tiles <= most) return;
  refuse("layer_tiles", fmt::format("intermediate_size {} allows at most {} tiles of {}, got {}",
                                    c.intermediate_size, most, kTileStep, c.layer_tiles));
}

/// Size of the largest block of a layer, in elements.
Elems largest_block(const ModelConfig& c, std::uint64_t expert_ranks) {
  Elems largest = 0;
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    for (const BlockSpec& block : layer_blocks(c, index, expert_ranks)) {
      largest = std::max(largest, block.elements);
    }
  }
  return largest;
}

void complete_vocabulary_tiles(ModelConfig& c, std::uint64_t expert_ranks, const Refuse& refuse) {
  if (c.vocabulary_tiles == 0) {
    const bool small = usual_vocabulary_tiles(c.vocab_size, c.hidden_size, 0) == 1;
    c.vocabulary_tiles = usual_vocabulary_tiles(c.vocab_size, c.hidden_size,
                                                small ? 0 : largest_block(c, expert_ranks));
  }
  const std::uint64_t most = steps_of(c.vocab_size);
  if (c.vocabulary_tiles <= most) return;
  refuse("vocabulary_tiles", fmt::format("{} tokens allow at most {} tiles of {} rows, got {}",
                                         c.vocab_size, most, kTileStep, c.vocabulary_tiles));
}

std::size_t blocks_of_layers(const ModelConfig& c, std::uint64_t expert_ranks) {
  const Family& described = family(c.family);
  std::size_t count = 0;
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    const std::uint64_t experts = described.experts_of_layer(c, index);
    count += described.count_blocks_of_layer(c, index) - experts + experts / expert_ranks;
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

void complete_tiles(ModelConfig& config, std::uint64_t expert_ranks, const Refuse& refuse) {
  const Family& described = family(config.family);
  complete_layer_tiles(config, described, refuse);
  complete_vocabulary_tiles(config, expert_ranks, refuse);
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

std::uint64_t attention_tiles(const ModelConfig& config) {
  std::uint64_t tiles = std::min(config.layer_tiles, config.num_kv_heads);
  while (config.num_kv_heads % tiles != 0) --tiles;
  return tiles;
}

ModelConfig config_of_tile(const ModelConfig& config) {
  ModelConfig one = config;
  const std::uint64_t attention = attention_tiles(config);
  one.num_heads /= attention;
  one.num_kv_heads /= attention;
  one.intermediate_size = 0;
  for (std::uint64_t t = 0; t < config.layer_tiles; ++t) {
    const TileRange range = tile_range(config.intermediate_size, config.layer_tiles, t);
    one.intermediate_size = std::max(one.intermediate_size, range.size);
  }
  one.layer_tiles = 1;
  return one;
}

VocabularyTile Architecture::tile(std::size_t number) const {
  VocabularyTile tile = vocabulary_tile(config, number);
  tile.block = (config.tie_embeddings ? 0 : head()) + number;
  return tile;
}

std::uint64_t Architecture::largest_tile() const {
  std::uint64_t rows = 0;
  for (std::size_t t = 0; t < config.vocabulary_tiles; ++t) {
    rows = std::max(rows, vocabulary_tile(config, t).rows);
  }
  return rows;
}

std::size_t Family::count_blocks_of_layer(const ModelConfig& config,
                                          std::uint64_t /*index*/) const {
  return config.layer_tiles == 1 ? 1 : 2 + attention_tiles(config) + config.layer_tiles;
}

std::size_t count_blocks(const ModelConfig& config, std::uint64_t expert_ranks) {
  const std::uint64_t tiles = config.vocabulary_tiles;
  return tiles + blocks_of_layers(config, expert_ranks) + (config.tie_embeddings ? 1 : tiles);
}

bool is_layer(const ModelConfig& config, std::size_t block, std::size_t blocks) {
  const std::uint64_t heads = config.tie_embeddings ? 1 : config.vocabulary_tiles;
  return block >= config.vocabulary_tiles && block + heads < blocks;
}

}  // namespace ballast::model
