#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Returns whether rows of tokens are trained in the block, which is then a tile of the embedding.
[[nodiscard]] bool has_slots(const Architecture& model, const BlockSpec& block);

/// Layout of the fp32 gradient sum of a block with slots: a row per distinct token of a step, then
/// the learned positions.
struct SlotSums {
  Elems table = 0;  ///< elements of the block before the positions; 0: other blocks
  Elems rest = 0;   ///< elements of the positions with their padding

  /// `block`: of one rank, without further pieces.
  SlotSums(const Architecture& model, const BlockSpec& block);
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

/// The slot of the pad token, which no row has (kNoSlot).
inline constexpr std::int32_t kPadSlot = -1;
/// Returns the slot of each of a step's `tokens` in its vocabulary tile, in the order in which they
/// occur. Tokens of other tensor places have slot 0, the pad token has kPadSlot.
[[nodiscard]] std::vector<std::int32_t> number_slots(const Architecture& own,
                                                     std::span<const std::int32_t> tokens);

}  // namespace ballast::model
