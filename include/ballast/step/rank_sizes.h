#pragma once

#include <cstdint>

#include "ballast/core/units.h"
#include "ballast/core/weight_codes.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Sizes of a block's data on one rank under ZeRO's stages (arXiv 1910.02054, section 5): optimizer
/// states are split from stage 1, packed gradients from stage 2, and weights in stage 3, except in
/// blocks that keep them whole (all partly trained ones do). A shard is one of `world` equal
/// parts of whole pages; padding follows the block's bytes. Rank r owns shard r (but see below).
/// One rank has no padding. With expert parallelism a rank's expert is its shard of everything:
/// ranks exchange nothing of the block, so its sizes are those of a run with one rank.
///
/// Weights may be split over a group of ranks (hpZ of ZeRO++, arXiv 2306.10209, section 3.2): ranks
/// [k * group, (k + 1) * group) hold one copy, an equal share each. Ranks at the same place in
/// their groups hold the same share, and the shards that they own make up that share: shards are
/// numbered by place first, then by group.
class RankSizes {
 public:
  explicit RankSizes(const Problem& problem) : problem_(problem) {}

  [[nodiscard]] bool several() const { return problem_.world > 1; }
  /// Returns whether several ranks share weights and gradients of the block.
  [[nodiscard]] bool several(std::uint32_t block) const { return several() && !is_per_rank(block); }
  [[nodiscard]] bool splits_states(std::uint32_t block) const {
    return several(block) && problem_.stage >= 1;
  }
  [[nodiscard]] bool splits_gradients(std::uint32_t block) const {
    return several(block) && problem_.stage >= 2;
  }
  [[nodiscard]] bool splits_weights(std::uint32_t block) const {
    return several(block) && problem_.stage >= 3 && !problem_.blocks[block].keeps_whole;
  }
  /// Returns whether a rank updates only its shard of the weights that it keeps.
  [[nodiscard]] bool updates_shard(std::uint32_t block) const {
    return splits_states(block) && (!splits_weights(block) || shards_in_share() > 1);
  }
  /// Returns whether a rank keeps only a part of the block's states, or weights.
  [[nodiscard]] bool keeps_part_of_states(std::uint32_t block) const {
    return several() && (problem_.stage >= 1 || is_per_rank(block));
  }
  [[nodiscard]] bool keeps_part_of_weights(std::uint32_t block) const {
    return splits_weights(block) || (several() && is_per_rank(block));
  }

  /// Number of ranks that share one copy of split weights.
  [[nodiscard]] std::uint32_t group() const {
    return problem_.stage >= 3 && problem_.weight_ranks > 0 ? problem_.weight_ranks
                                                            : problem_.world;
  }
  /// Number of shards in a rank's share of split weights; also the number of groups.
  [[nodiscard]] std::uint32_t shards_in_share() const { return problem_.world / group(); }
  /// Returns the shard that `rank` owns.
  [[nodiscard]] std::uint32_t shard_of(std::uint32_t rank) const {
    return rank % group() * shards_in_share() + rank / group();
  }
  [[nodiscard]] std::uint32_t owner_of(std::uint32_t shard) const {
    return shard % shards_in_share() * group() + shard / shards_in_share();
  }
  /// Returns the index of `rank`'s shard among the shards of the weights that it keeps.
  [[nodiscard]] std::uint32_t shard_at_home(std::uint32_t block, std::uint32_t rank) const {
    return splits_weights(block) ? shard_of(rank) % shards_in_share() : shard_of(rank);
  }

  [[nodiscard]] Bytes weight_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].weight_bytes);
  }
  [[nodiscard]] Bytes whole_weights(std::uint32_t block) const {
    return shards(block) * weight_shard(block);
  }
  [[nodiscard]] Bytes gradient_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].gradient_bytes);
  }
  [[nodiscard]] Bytes whole_gradient(std::uint32_t block) const {
    return shards(block) * gradient_shard(block);
  }

  /// Returns the size of a rank's share of split weights.
  [[nodiscard]] Bytes weight_share(std::uint32_t block) const {
    return shards_in_share() * weight_shard(block);
  }
  /// Returns the size of the weights in their home.
  [[nodiscard]] Bytes weights(std::uint32_t block) const {
    return splits_weights(block) ? weight_share(block) : whole_weights(block);
  }
  /// Returns whether gathers of split weights move codes.
  [[nodiscard]] bool codes_weights() const { return problem_.coded_weight > 0; }
  [[nodiscard]] Bytes share_codes(std::uint32_t block) const {
    return WeightCodes::bytes_of(weight_share(block) / problem_.coded_weight);
  }
  [[nodiscard]] Bytes whole_codes(std::uint32_t block) const {
    return group() * share_codes(block);
  }
  /// Returns the size of the weights that this rank updates: its shard of the trained ones, which
  /// come first.
  [[nodiscard]] Bytes updated_weights(std::uint32_t block) const {
    return splits_weights(block) ? weight_shard(block) : updated_gradient(block);
  }
  /// Returns the size of the trained weights that a rank keeps: whole, or its share if they are
  /// split.
  [[nodiscard]] Bytes updated_by_all(std::uint32_t block) const {
    return splits_weights(block) ? weight_share(block) : whole_gradient(block);
  }
  /// Returns the size of the gradient that this rank's update reads.
  [[nodiscard]] Bytes updated_gradient(std::uint32_t block) const {
    return splits_states(block) ? gradient_shard(block) : whole_gradient(block);
  }
  [[nodiscard]] Bytes states(std::uint32_t block, std::uint32_t sub_group) const {
    return problem_.blocks[block].sub_groups[sub_group].state_bytes;
  }

  /// Returns the bytes that this rank receives if `whole` bytes are gathered or scattered over all
  /// ranks.
  [[nodiscard]] Bytes exchanged(Bytes whole) const { return whole - whole / problem_.world; }
  /// Returns the bytes that it receives if `whole` bytes are gathered from the ranks of its group.
  [[nodiscard]] Bytes exchanged_in_group(Bytes whole) const { return whole - whole / group(); }

 private:
  [[nodiscard]] bool is_per_rank(std::uint32_t block) const {
    return problem_.program().blocks[block].per_rank;
  }
  [[nodiscard]] std::uint32_t shards(std::uint32_t block) const {
    return several(block) ? problem_.world : 1;
  }
  [[nodiscard]] Bytes shard(std::uint32_t block, Bytes whole) const {
    return several(block) ? round_up((whole + problem_.world - 1) / problem_.world, kPage) : whole;
  }

  const Problem& problem_;
};

}  // namespace ballast::step
