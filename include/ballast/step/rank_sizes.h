#pragma once

#include <cstdint>

#include "ballast/core/units.h"
#include "ballast/core/weight_codes.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Returns the sharer that owns a shard if `per_copy` of the `sharers` hold a copy of split weights
/// together; see RankSizes.
constexpr std::uint32_t owner_of_shard(std::uint32_t shard, std::uint32_t sharers,
                                       std::uint32_t per_copy) {
  const std::uint32_t copies = sharers / per_copy;
  return shard % copies * per_copy + shard / copies;
}

/// Sizes of a block's data on one rank under ZeRO's stages (arXiv 1910.02054, section 5): optimizer
/// states are split from stage 1, packed gradients from stage 2, and weights in stage 3, except in
/// blocks that keep them whole (all partly trained ones do). A shard is one of `sharers` equal
/// parts of whole pages; padding follows the block's bytes. Rank r owns shard r (but see below).
/// One rank has no padding. With expert parallelism a rank's expert is its shard of everything:
/// ranks exchange nothing of the block, so its sizes are those of a run with one rank.
///
/// Weights may be split over a group of ranks (hpZ of ZeRO++, arXiv 2306.10209, section 3.2). With
/// n = ranks_per_copy(), ranks [k * n, (k + 1) * n) hold copy k, an equal partition each. Ranks at
/// the same place in their groups hold the same partition, which the shards of these ranks make up:
/// shards are numbered by place first, then by group. For 4 ranks and n = 2:
///
///     rank                    0      1      2      3
///     partition that it has   0 1    2 3    0 1    2 3     resident_weights(): two shards
///     shard that it updates   0      2      1      3       updated_weights(): one shard
class RankSizes {
 public:
  explicit RankSizes(const Problem& problem) : problem_(problem) {}

  [[nodiscard]] bool is_distributed() const { return problem_.sharers > 1; }
  /// Returns whether several ranks share weights and gradients of the block.
  [[nodiscard]] bool is_distributed(std::uint32_t block) const {
    return is_distributed() && !is_per_rank(block);
  }
  [[nodiscard]] bool shards_states(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 1;
  }
  [[nodiscard]] bool shards_gradients(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 2;
  }
  [[nodiscard]] bool shards_weights(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 3 && !problem_.blocks[block].replicated;
  }
  /// Returns whether a rank updates only its shard of the weights that it keeps.
  [[nodiscard]] bool updates_shard(std::uint32_t block) const {
    return shards_states(block) && (!shards_weights(block) || copies() > 1);
  }
  /// Returns whether a rank keeps only a part of the block's states, or weights.
  [[nodiscard]] bool keeps_part_of_states(std::uint32_t block) const {
    return is_distributed() && (problem_.stage >= 1 || is_per_rank(block));
  }
  [[nodiscard]] bool keeps_part_of_weights(std::uint32_t block) const {
    return shards_weights(block) || (is_distributed() && is_per_rank(block));
  }

  /// Number of ranks that share one copy of split weights.
  [[nodiscard]] std::uint32_t ranks_per_copy() const {
    return problem_.stage >= 3 && problem_.hpz_partition_size > 0 ? problem_.hpz_partition_size
                                                                  : problem_.sharers;
  }
  /// Number of copies of split weights, which is also the number of shards in a rank's partition.
  [[nodiscard]] std::uint32_t copies() const { return problem_.sharers / ranks_per_copy(); }
  /// Returns the shard that `rank` owns.
  [[nodiscard]] std::uint32_t shard_of(std::uint32_t rank) const {
    return rank % ranks_per_copy() * copies() + rank / ranks_per_copy();
  }
  [[nodiscard]] std::uint32_t owner_of(std::uint32_t shard) const {
    return owner_of_shard(shard, problem_.sharers, ranks_per_copy());
  }
  /// Returns the index of `rank`'s shard among the shards of the weights that it keeps.
  [[nodiscard]] std::uint32_t shard_at_home(std::uint32_t block, std::uint32_t rank) const {
    return shards_weights(block) ? shard_of(rank) % copies() : shard_of(rank);
  }

  [[nodiscard]] Bytes weight_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].weight_bytes);
  }
  [[nodiscard]] Bytes padded_weights(std::uint32_t block) const {
    return shards(block) * weight_shard(block);
  }
  [[nodiscard]] Bytes gradient_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].gradient_bytes);
  }
  [[nodiscard]] Bytes padded_gradient(std::uint32_t block) const {
    return shards(block) * gradient_shard(block);
  }

  /// Returns the size of the part of split weights that one rank keeps.
  [[nodiscard]] Bytes weight_partition(std::uint32_t block) const {
    return copies() * weight_shard(block);
  }
  /// Returns the size of the weights in their home.
  [[nodiscard]] Bytes resident_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_partition(block) : padded_weights(block);
  }
  /// Returns whether gathers of split weights move codes.
  [[nodiscard]] bool quantizes_gathers() const { return problem_.qwz_weight_bytes > 0; }
  [[nodiscard]] Bytes partition_codes(std::uint32_t block) const {
    return WeightCodes::bytes_of(weight_partition(block) / problem_.qwz_weight_bytes);
  }
  [[nodiscard]] Bytes gathered_codes(std::uint32_t block) const {
    return ranks_per_copy() * partition_codes(block);
  }
  /// Returns the size of the weights that this rank updates: its shard of the trained ones, which
  /// come first.
  [[nodiscard]] Bytes updated_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_shard(block) : updated_gradient(block);
  }
  /// Returns the size of the trained weights that a rank keeps: whole, or its partition if
  /// they are split.
  [[nodiscard]] Bytes trained_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_partition(block) : padded_gradient(block);
  }
  /// Returns the size of the gradient that this rank's update reads.
  [[nodiscard]] Bytes updated_gradient(std::uint32_t block) const {
    return shards_states(block) ? gradient_shard(block) : padded_gradient(block);
  }
  [[nodiscard]] Bytes states(std::uint32_t block, std::uint32_t sub_group) const {
    return problem_.blocks[block].sub_groups[sub_group].state_bytes;
  }

  /// Returns the bytes that this rank receives if `whole` bytes are gathered or scattered over all
  /// ranks.
  [[nodiscard]] Bytes received_from_all(Bytes whole) const {
    return whole - whole / problem_.sharers;
  }
  /// Returns the bytes that it receives if `whole` bytes are gathered from the ranks that share its
  /// copy.
  [[nodiscard]] Bytes received_from_copy(Bytes whole) const {
    return whole - whole / ranks_per_copy();
  }

 private:
  [[nodiscard]] bool is_per_rank(std::uint32_t block) const {
    return problem_.program().blocks[block].per_rank;
  }
  [[nodiscard]] std::uint32_t shards(std::uint32_t block) const {
    return is_distributed(block) ? problem_.sharers : 1;
  }
  [[nodiscard]] Bytes shard(std::uint32_t block, Bytes whole) const {
    return is_distributed(block)
               ? round_up((whole + problem_.sharers - 1) / problem_.sharers, kPage)
               : whole;
  }

  const Problem& problem_;
};

}  // namespace ballast::step
