#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {

namespace {

void require(std::uint64_t value, const Refuse& refuse, std::string_view key,
             std::string_view what) {
  if (value == 0) refuse(key, fmt::format("missing; give {}", what));
}

void complete_heads(ModelConfig& c, const Refuse& refuse) {
  if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
  if (const std::uint64_t width = family(c.family).head_width(c); width > 0) {
    if (c.head_dim != 0 && c.head_dim != width) {
      refuse("head_dim", fmt::format("other keys of {} give heads of {} values; remove this one",
                                     c.family, width));
    }
    c.head_dim = width;
  }
  if (c.head_dim == 0) {
    if (c.hidden_size % c.num_heads != 0) {
      refuse("num_heads",
             fmt::format("{} does not divide hidden_size {}", c.num_heads, c.hidden_size));
    }
    c.head_dim = c.hidden_size / c.num_heads;
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    refuse("num_kv_heads",
           fmt::format("{} does not divide num_heads {}", c.num_kv_heads, c.num_heads));
  }
}

std::string name_of_tile(const ModelConfig& c, std::string_view name, std::uint64_t tile) {
  return c.vocabulary_tiles == 1 ? std::string(name) : fmt::format("{} {}", name, tile);
}

BlockSpec embedding_block(const ModelConfig& c, const OuterSpec& outer, std::uint64_t tile) {
  BlockBuilder block(BlockKind::embedding, name_of_tile(c, "embedding", tile), "");
  const VocabularyTile own = vocabulary_tile(c, tile);
  // The tokens come first, because a tied gradient is added to the start of the block's gradient.
  block.add(outer.tokens, {own.rows, c.hidden_size}, Init::normal, c.init_stddev);
  block.rows_of(c.vocab_size, own.first);
  // The positions come last, because a file has all rows of the tokens before them.
  if (!outer.positions.empty() && tile + 1 == c.vocabulary_tiles) {
    block.add(outer.positions, {c.max_sequence, c.hidden_size}, Init::normal, c.init_stddev);
  }
  return block.finish();
}

/// Adds rows of the output matrix.
void add_output(BlockBuilder& block, const ModelConfig& c, const OuterSpec& outer,
                const VocabularyTile& tile) {
  block.add(outer.output, {tile.rows, c.hidden_size}, Init::normal, c.init_stddev);
  block.rows_of(c.vocab_size, tile.first);
}

/// The norm and, unless it is tied or has other blocks, the output matrix.
BlockSpec head_block(const ModelConfig& c, const OuterSpec& outer, const RankSplit& split) {
  BlockBuilder block(BlockKind::head, "head", "");
  block.add_norm(outer.norm, c.hidden_size);
  const bool whole = !c.tie_embeddings && c.vocabulary_tiles == 1;
  if (whole) add_output(block, c, outer, vocabulary_tile(c, 0));
  BlockSpec head = block.finish();
  if (whole || c.tie_embeddings) {
    head.product_elements = c.vocab_size * c.hidden_size / split.tensor;
  }
  return head;
}

BlockSpec output_block(const ModelConfig& c, const OuterSpec& outer, std::uint64_t tile) {
  BlockBuilder block(BlockKind::head, name_of_tile(c, "head", tile), "");
  const VocabularyTile own = vocabulary_tile(c, tile);
  add_output(block, c, outer, own);
  BlockSpec output = block.finish();
  output.product_elements = own.rows * c.hidden_size;
  return output;
}

/// Returns a block per vocabulary tile, made by `make(tile)`, joined for the tensor places.
template <class Make>
std::vector<BlockSpec> vocabulary_blocks(const ModelConfig& c, const RankSplit& split, Make make) {
  std::vector<BlockSpec> tiles;
  for (std::uint64_t tile = 0; tile < c.vocabulary_tiles; ++tile) tiles.push_back(make(tile));
  return join_tiles(std::move(tiles), split.tensor);
}

void number_blocks(std::vector<BlockSpec>& blocks) {
  std::size_t number = 0;
  for (std::size_t b = 0; b < blocks.size();) {
    // Joined tiles of one group have numbers in turn.
    const std::size_t run = blocks[b].number_step;
    const std::size_t pieces = blocks[b].pieces;
    for (std::size_t i = 0; i < run; ++i) blocks[b++].number = number + i;
    number += run * pieces;
  }
}

void check_pad_token(const ModelConfig& c, const Refuse& refuse) {
  const auto found = c.details.find(kPadToken);
  if (found == c.details.end() || found->second.is_null()) return;
  const auto token = found->second.whole();
  if (token && *token < c.vocab_size) return;
  refuse(kPadToken, fmt::format("must be a token below vocab_size ({}) or null, got {}",
                                c.vocab_size, found->second.described()));
}

}  // namespace

void complete(ModelConfig& c, const Refuse& refuse, const RankSplit& split) {
  const Family& described = family(c.family);
  for (const DetailKey& key : described.details()) c.details.try_emplace(key.name, key.standard);
  require(c.vocab_size, refuse, "vocab_size", "the number of token values");
  require(c.hidden_size, refuse, "hidden_size", "the width of the model");
  require(c.num_layers, refuse, "num_layers", "the number of transformer layers");
  require(c.num_heads, refuse, "num_heads", "the number of attention heads");
  complete_heads(c, refuse);
  if (c.vocab_size > 0x7fffffffU) {
    refuse("vocab_size", fmt::format("{} does not fit 32-bit tokens", c.vocab_size));
  }
  if (!(c.norm_epsilon > 0.0)) refuse("norm_epsilon", "must be above 0");
  if (!(c.init_stddev >= 0.0) || std::isinf(c.init_stddev)) {
    refuse("init_stddev", "must be a finite number, at least 0");
  }
  check_pad_token(c, refuse);
  described.complete(c, refuse);
  require(c.intermediate_size, refuse, "intermediate_size", "the width of the MLP");
  if (!described.outer(c).positions.empty()) {
    require(c.max_sequence, refuse, "max_sequence", "the number of learned positions");
  }
  complete_tiles(c, split, refuse);
}

Architecture build_architecture(ModelConfig config, const RankSplit& split) {
  const auto refuse = [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, fmt::format("model.{}: {}", key, rule));
  };
  complete(config, refuse, split);
  Architecture model = {.outer = family(config.family).outer(config), .split = split};
  model.layers = std::make_shared<const std::vector<LayerSpec>>(layers_of(config));
  model.config = std::move(config);
  const ModelConfig& c = model.config;
  const OuterSpec& outer = model.outer;
  model.blocks = vocabulary_blocks(
      c, split, [&](std::uint64_t tile) { return embedding_block(c, outer, tile); });
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    for (BlockSpec& block : joined_blocks_of(model.layer(index), c, index, split)) {
      model.blocks.push_back(std::move(block));
    }
  }
  model.blocks.push_back(head_block(c, outer, split));
  if (!c.tie_embeddings && c.vocabulary_tiles > 1) {
    for (BlockSpec& block : vocabulary_blocks(
             c, split, [&](std::uint64_t tile) { return output_block(c, outer, tile); })) {
      model.blocks.push_back(std::move(block));
    }
  }
  number_blocks(model.blocks);
  const bool shares = std::ranges::any_of(model.blocks, [](const BlockSpec& block) {
    return block.content == BlockContent::expert && block.pieces > 1;
  });
  if (shares || split.experts == 1) return model;
  throw Error(ErrorCategory::config,
              "ballast.expert_parallel: the model has no experts; leave the key out");
}

}  // namespace ballast::model

// Blocks of several pieces, of which each rank has one.

namespace ballast::model {

namespace {

/// Fields that are sums over the experts of a block.
constexpr std::array kExpertSums = {&BlockSpec::product_elements, &BlockSpec::last_product_elements,
                                    &BlockSpec::frozen_product_elements};

/// Adds a piece of the same size to a block.
void add_piece(BlockSpec& block, const BlockSpec& next) {
  for (TensorSpec tensor : next.tensors) {
    tensor.offset += block.elements;
    block.tensors.push_back(std::move(tensor));
  }
  block.parameters += next.parameters;
  block.elements += next.elements;
  ++block.pieces;
}

/// Adds the next expert of the same layer to a block of experts.
void add_expert(BlockSpec& block, const BlockSpec& next) {
  add_piece(block, next);
  for (const auto sum : kExpertSums) block.*sum += next.*sum;
  block.name = fmt::format("layer {} experts {}-{}", block.layer, block.expert,
                           block.expert + block.pieces - 1);
}

/// Ends the name of a block of tiles, after the name of the first one.
constexpr std::string_view kPerPlace = " per place";

/// Returns the name of the tile that is `distance` tiles after the first one of a block of tiles.
std::string name_of_piece(std::string_view block, std::uint64_t distance) {
  const std::string_view first = block.substr(0, block.size() - kPerPlace.size());
  const std::size_t number = first.rfind(' ') + 1;
  return fmt::format("{}{}", first.substr(0, number),
                     std::stoull(std::string(first.substr(number))) + distance);
}

bool is_tile(const BlockSpec& block) {
  return block.content == BlockContent::attention || block.content == BlockContent::mlp;
}

/// Joins the tiles of each half of a layer.
std::vector<BlockSpec> join_tiles_of_layer(std::vector<BlockSpec> blocks, std::uint64_t places) {
  std::vector<BlockSpec> joined;
  for (auto first = blocks.begin(); first != blocks.end();) {
    const BlockContent content = first->content;
    const auto end = std::find_if(first, blocks.end(), [content](const BlockSpec& block) {
      return block.content != content;
    });
    std::vector<BlockSpec> run;
    std::move(first, end, std::back_inserter(run));
    if (is_tile(run.front())) run = join_tiles(std::move(run), places);
    std::move(run.begin(), run.end(), std::back_inserter(joined));
    first = end;
  }
  return joined;
}

}  // namespace

std::vector<BlockSpec> join_tiles(std::vector<BlockSpec> tiles, std::uint64_t places) {
  Elems largest = 0;
  for (const BlockSpec& tile : tiles) largest = std::max(largest, tile.elements);
  for (BlockSpec& tile : tiles) tile.elements = largest;
  if (places == 1) return tiles;
  expects(tiles.size() % places == 0, "tensor places cannot share the tiles equally");
  const std::size_t per_place = tiles.size() / places;
  std::vector<BlockSpec> joined;
  for (std::size_t i = 0; i < per_place; ++i) {
    BlockSpec block = tiles[i];
    block.name += kPerPlace;
    block.number_step = per_place;
    for (std::size_t next = i + per_place; next < tiles.size(); next += per_place) {
      add_piece(block, tiles[next]);
      // All places have the cost of the largest tile.
      block.product_elements = std::max(block.product_elements, tiles[next].product_elements);
      block.last_product_elements =
          std::max(block.last_product_elements, tiles[next].last_product_elements);
    }
    joined.push_back(std::move(block));
  }
  return joined;
}

std::vector<BlockSpec> joined_blocks_of(const LayerSpec& layer, const ModelConfig& config,
                                        std::uint64_t index, const RankSplit& split) {
  const auto* const experts = layer.find<ExpertsSpec>();
  if (experts != nullptr && experts->count % split.experts != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("ballast.expert_parallel: {} ranks cannot share {} experts equally; "
                            "set it to 1 to keep all experts on every rank",
                            split.experts, experts->count));
  }
  std::vector<BlockSpec> blocks;
  for (BlockSpec& block : blocks_of(layer, config, index)) {
    block.layer = index;
    const bool joins = block.content == BlockContent::expert && block.expert % split.experts != 0;
    if (joins) {
      add_expert(blocks.back(), block);
    } else {
      blocks.push_back(std::move(block));
    }
  }
  return join_tiles_of_layer(std::move(blocks), split.tensor);
}

BlockSpec piece_of(const BlockSpec& block, std::uint64_t piece) {
  BlockSpec one = block;
  if (block.pieces == 1) return one;
  const Elems own = block.own_elements();
  const Elems begin = piece * own;
  one.tensors.clear();
  one.pieces = 1;
  one.parameters = 0;
  one.elements = own;
  one.frozen_elements = block.frozen_elements / block.pieces;
  one.number = block.number + piece * block.number_step;
  for (TensorSpec tensor : block.tensors) {
    if (tensor.offset < begin || tensor.offset >= begin + own) continue;
    tensor.offset -= begin;
    one.parameters += tensor.size;
    one.tensors.push_back(std::move(tensor));
  }
  if (block.content != BlockContent::expert) {
    one.name = name_of_piece(block.name, piece * block.number_step);
    one.number_step = 1;
    return one;
  }
  one.name = fmt::format("layer {} expert {}", block.layer, block.expert + piece);
  one.expert += piece;
  for (const auto sum : kExpertSums) one.*sum /= block.pieces;
  return one;
}

std::vector<BlockSpec> whole_blocks(const Architecture& model) {
  std::vector<BlockSpec> blocks;
  for (const BlockSpec& block : model.blocks) {
    for (std::uint64_t p = 0; p < block.pieces; ++p) blocks.push_back(piece_of(block, p));
  }
  std::ranges::sort(blocks, {}, &BlockSpec::number);
  return blocks;
}

Architecture at_tensor_place(const Architecture& model, std::uint64_t place) {
  if (model.split.tensor == 1) return model;
  Architecture own = model;
  own.tensor_place = place;
  for (BlockSpec& block : own.blocks) {
    if (block.pieces > 1) block = piece_of(block, place);
  }
  return own;
}

}  // namespace ballast::model
