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

/// Sets the numbers of tiles in complete(); needs all other keys.
void complete_tiles(ModelConfig& config, std::uint64_t expert_ranks, const Refuse& refuse);

/// Returns the blocks of layer `index`, with one expert per rank in a block. Throws Error(config)
/// if the ranks cannot share the experts.
std::vector<BlockSpec> layer_blocks(const ModelConfig& config, std::uint64_t index,
                                    std::uint64_t expert_ranks);

/// Rows of the vocabulary in tile `number` of a complete config. VocabularyTile::block is not set.
VocabularyTile vocabulary_tile(const ModelConfig& config, std::uint64_t number);

}  // namespace ballast::model
