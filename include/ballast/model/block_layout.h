#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Alignment of tensors (a cache line in the smallest kind of state) and of blocks, in elements.
inline constexpr Elems kTensorStep = 32;
inline constexpr Elems kBlockStep = 2048;

/// Moves the trained tensors of `block` to the front and the quantised ones to the end, and lays
/// out all tensors again. A block of several experts, all trained or all frozen, keeps its layout.
void arrange(BlockSpec& block);

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

/// Returns whether layers of a complete config can be cut into tiles that `places` tensor places
/// share.
bool cuts_layers(const ModelConfig& config, std::uint64_t places = 1);

/// Pads the tiles of a matrix or of half a layer to the size of the largest, and joins tiles i, i +
/// k, i + 2 k, ... to one block for each i below k: the number of tiles divided by the number of
/// tensor places, which divides it.
std::vector<BlockSpec> join_tiles(std::vector<BlockSpec> tiles, std::uint64_t places);

/// Rows of the vocabulary in tile `number` of a complete config. VocabularyTile::block is not set.
VocabularyTile vocabulary_tile(const ModelConfig& config, std::uint64_t number);

/// Returns whether rows of tokens are trained in the block, which is then a tile of the embedding.
[[nodiscard]] bool has_token_sums(const Architecture& model, const BlockSpec& block);

/// Layout of the fp32 gradient sum of a block with sum rows: a row per distinct token of a step,
/// then the learned positions.
struct TokenSums {
  Elems table = 0;  ///< elements of the block before the positions; 0: other blocks
  Elems rest = 0;   ///< elements of the positions with their padding

  /// `block`: of one rank, without further pieces.
  TokenSums(const Architecture& model, const BlockSpec& block);
};

/// Returns the elements of a block's gradient sum. A step has `tokens` tokens.
[[nodiscard]] Elems elements_of_sum(const Architecture& model, const BlockSpec& block,
                                    std::uint64_t tokens);

/// The key of the model section for the token whose row of the embedding gets no gradient from the
/// tokens of a batch, like padding_idx of nn.Embedding. The gradient of a tied output matrix
/// remains. Families have the key if their class in transformers passes pad_token_id to
/// nn.Embedding.
inline constexpr const char* kPadToken = "pad_token_id";
/// Returns that token; nothing if there is none.
[[nodiscard]] std::optional<std::int32_t> pad_token(const ModelConfig& config);

/// The sum row of the pad token, which no row has (kNoSumRow).
inline constexpr std::int32_t kPadSumRow = -1;
/// Returns the sum row of each of a step's `tokens` in its vocabulary tile, in the order in which
/// they occur. Tokens of other tensor places have sum row 0, the pad token has kPadSumRow.
[[nodiscard]] std::vector<std::int32_t> number_sum_rows(const Architecture& own,
                                                        std::span<const std::int32_t> tokens);

}  // namespace ballast::model
