#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/spec/tiles.h"

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
  return block.part == LayerPart::attention || block.part == LayerPart::mlp;
}

/// Joins the tiles of each half of a layer.
std::vector<BlockSpec> join_tiles_of_layer(std::vector<BlockSpec> blocks, std::uint64_t places) {
  std::vector<BlockSpec> joined;
  for (auto first = blocks.begin(); first != blocks.end();) {
    const LayerPart part = first->part;
    const auto end = std::find_if(first, blocks.end(),
                                  [part](const BlockSpec& block) { return block.part != part; });
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

std::vector<BlockSpec> layer_blocks(const ModelConfig& config, std::uint64_t index,
                                    const RankSplit& split) {
  const Family& described = family(config.family);
  const std::uint64_t experts = described.experts_of_layer(config, index);
  if (experts % split.experts != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("ballast.expert_parallel: {} ranks cannot share {} experts equally; "
                            "set it to 1 to keep all experts on every rank",
                            split.experts, experts));
  }
  std::vector<BlockSpec> blocks;
  for (BlockSpec& block : described.blocks_of_layer(config, index)) {
    block.layer = index;
    const bool joins = block.part == LayerPart::expert && block.expert % split.experts != 0;
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
  if (block.part != LayerPart::expert) {
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
