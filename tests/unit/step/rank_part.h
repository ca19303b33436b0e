#pragma once

#include <cstdint>

#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Bytes of a buffer.
struct BufferRange {
  BufferId buffer = kNoBuffer;
  Bytes begin = 0;
  Bytes bytes = 0;
};

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
  /// The bytes of a buffer that a movement or an update uses; see src/engine/handlers.h.
  [[nodiscard]] BufferRange home(const Operation& op, const Use& use, Bytes bytes,
                                 const Schedule& schedule) const {
    const bool weights = use.role == Role::weights || op.payload == Payload::weights;
    const std::uint32_t shard =
        weights ? rank.shard_at_home(op.block, number) : rank.shard_of(number);
    const bool staged = (op.action == Action::fetch && use.writes) ||
                        (op.action == Action::writeback && !use.writes);
    const bool offset = staged || schedule.buffers[use.buffer].tier == Tier::device;
    const bool counts = moves(op, MovedValue::routing) && use.writes;
    const std::uint32_t place = counts ? op.micro : use.shard ? shard : 0;
    return {use.buffer, place * bytes + (offset ? op.offset : 0), bytes};
  }

  const Problem& problem;
  RankSizes rank;
  bool trains;
  std::uint32_t number;  ///< rank
};

}  // namespace ballast::step
