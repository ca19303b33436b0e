#pragma once

#include <cstdint>

#include "ballast/step/problem.h"
#include "ballast/step/rank_sizes.h"

namespace ballast::step {

/// Where the data of a rank begin in those of a block.
struct RankPart {
  RankPart(const Problem& of, bool for_training, std::uint32_t of_rank)
      : problem(of), rank(of), trains(for_training), number(of_rank) {}

  [[nodiscard]] bool is_trained(std::uint32_t block) const {
    return trains && !problem.blocks[block].is_frozen();
  }
  /// The weights of a block begin with those that updates change.
  [[nodiscard]] Bytes trained_bytes(std::uint32_t block) const {
    if (!is_trained(block)) return 0;
    return rank.shards_weights(block) ? rank.padded_weights(block) : rank.padded_gradient(block);
  }
  /// Where the weights begin, in the block, that the rank keeps, and those that it updates.
  [[nodiscard]] Bytes kept_from(std::uint32_t block) const {
    if (!rank.shards_weights(block)) return 0;
    return number % rank.ranks_per_copy() * rank.weight_partition(block);
  }
  [[nodiscard]] Bytes updated_from(std::uint32_t block) const {
    if (!rank.shards_states(block)) return 0;
    return kept_from(block) + rank.shard_at_home(block, number) * rank.updated_weights(block);
  }
  [[nodiscard]] Bytes gradient_from(std::uint32_t block) const {
    return rank.shards_states(block) ? rank.shard_of(number) * rank.gradient_shard(block) : 0;
  }

  const Problem& problem;
  RankSizes rank;
  bool trains;
  std::uint32_t number;  ///< rank
};

}  // namespace ballast::step
