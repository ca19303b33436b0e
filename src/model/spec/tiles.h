#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Part `number` of `size` rows or columns in `tiles` parts. Parts differ by at most kTileStep and
/// begin at multiples of it.
struct TileRange {
  std::uint64_t first = 0;
  std::uint64_t size = 0;
};
inline constexpr std::uint64_t kTileStep = 16;
TileRange tile_range(std::uint64_t size, std::uint64_t tiles, std::uint64_t number);

/// Returns the largest number of tiles, at most `most`, that share `heads` equally.
std::uint64_t tiles_of_heads(std::uint64_t heads, std::uint64_t most);

/// Sets the numbers of tiles in complete(); needs all other keys. Default numbers are multiples of
/// the number of tensor places.
void complete_tiles(ModelConfig& config, const RankSplit& split, const Refuse& refuse);

/// Returns the blocks of layer `index`, with one piece per rank in a block. Throws Error(config) if
/// the ranks cannot share the experts.
std::vector<BlockSpec> layer_blocks(const ModelConfig& config, std::uint64_t index,
                                    const RankSplit& split);

/// Pads the tiles of a matrix or of half a layer to the size of the largest, and joins tiles i, i +
/// k, i + 2 k, ... to one block for each i below k: the number of tiles divided by the number of
/// tensor places, which divides it.
std::vector<BlockSpec> join_tiles(std::vector<BlockSpec> tiles, std::uint64_t places);

/// Rows of the vocabulary in tile `number` of a complete config. VocabularyTile::block is not set.
VocabularyTile vocabulary_tile(const ModelConfig& config, std::uint64_t number);

}  // namespace ballast::model
