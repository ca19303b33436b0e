#pragma once

#include <cstdint>

#include "ballast/core/weight_codes.h"
#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// How large everything of a block is on one rank under ZeRO's stages (arXiv 1910.02054, section
/// 5): optimizer states are split from stage 1, the gradients that wait for them from stage 2,
/// weights in stage 3, but for those of blocks that keep them whole. A part is one of `world` equal
/// parts of whole pages, so that the whole is padded behind the block's own bytes; rank r's part is
/// the r-th (but see below). One rank's part is exactly the block.
///
/// Weights may be split over fewer ranks than all (hpZ of ZeRO++, arXiv 2306.10209, section 3.2):
/// ranks [k * group, (k + 1) * group) have a copy of them together, one equal share of it each. A
/// rank's share is then that of the ranks at its place in the other groups, and theirs are the
/// parts that it is made of: so numbers of parts go by place first, then by group.
class RankSizes {
 public:
  explicit RankSizes(const Workload& workload) : work_(workload) {}

  [[nodiscard]] bool several() const { return work_.world > 1; }
  [[nodiscard]] bool splits_states() const { return several() && work_.stage >= 1; }
  [[nodiscard]] bool splits_gradients() const { return several() && work_.stage >= 2; }
  [[nodiscard]] bool splits_weights(std::uint32_t block) const {
    return several() && work_.stage >= 3 && !work_.blocks[block].keeps_whole;
  }
  /// Whether a rank updates just its part of the weights that it keeps.
  [[nodiscard]] bool updates_part(std::uint32_t block) const {
    return splits_states() && (!splits_weights(block) || parts_in_share() > 1);
  }

  /// Ranks that have a copy of split weights together.
  [[nodiscard]] std::uint32_t group() const {
    return work_.stage >= 3 && work_.weight_ranks > 0 ? work_.weight_ranks : work_.world;
  }
  /// Parts of which a rank's share of split weights is made; also the number of groups.
  [[nodiscard]] std::uint32_t parts_in_share() const { return work_.world / group(); }
  /// Number of the part that is `rank`'s.
  [[nodiscard]] std::uint32_t part_of(std::uint32_t rank) const {
    return rank % group() * parts_in_share() + rank / group();
  }
  /// The rank whose part is number `part`.
  [[nodiscard]] std::uint32_t owner_of(std::uint32_t part) const {
    return part % parts_in_share() * group() + part / parts_in_share();
  }
  /// Where `rank`'s part is among those of the weights that it keeps.
  [[nodiscard]] std::uint32_t place_at_home(std::uint32_t block, std::uint32_t rank) const {
    return splits_weights(block) ? part_of(rank) % parts_in_share() : part_of(rank);
  }

  [[nodiscard]] Bytes weight_part(std::uint32_t block) const {
    return part(work_.blocks[block].weight_bytes);
  }
  [[nodiscard]] Bytes whole_weights(std::uint32_t block) const {
    return work_.world * weight_part(block);
  }
  [[nodiscard]] Bytes gradient_part(std::uint32_t block) const {
    return part(work_.blocks[block].gradient_bytes);
  }
  [[nodiscard]] Bytes whole_gradient(std::uint32_t block) const {
    return work_.world * gradient_part(block);
  }

  /// What a rank keeps of split weights.
  [[nodiscard]] Bytes weight_share(std::uint32_t block) const {
    return parts_in_share() * weight_part(block);
  }
  /// Weights where they live between uses.
  [[nodiscard]] Bytes weights(std::uint32_t block) const {
    return splits_weights(block) ? weight_share(block) : whole_weights(block);
  }
  /// Whether gathers of split weights move codes.
  [[nodiscard]] bool codes_weights() const { return work_.coded_weight > 0; }
  /// One rank's share as codes.
  [[nodiscard]] Bytes share_codes(std::uint32_t block) const {
    return WeightCodes::bytes_of(weight_share(block) / work_.coded_weight);
  }
  [[nodiscard]] Bytes whole_codes(std::uint32_t block) const {
    return group() * share_codes(block);
  }
  /// The weights that this rank updates.
  [[nodiscard]] Bytes updated_weights(std::uint32_t block) const {
    return splits_states() ? weight_part(block) : whole_weights(block);
  }
  /// The gradient that this rank's update reads.
  [[nodiscard]] Bytes updated_gradient(std::uint32_t block) const {
    return splits_states() ? gradient_part(block) : whole_gradient(block);
  }
  [[nodiscard]] Bytes states(std::uint32_t block) const { return work_.blocks[block].state_bytes; }

  /// What this rank receives when `whole` bytes are gathered from, or scattered to, all ranks.
  [[nodiscard]] Bytes exchanged(Bytes whole) const { return whole - whole / work_.world; }
  /// What it receives when they are gathered from the ranks of its group.
  [[nodiscard]] Bytes exchanged_in_group(Bytes whole) const { return whole - whole / group(); }

 private:
  [[nodiscard]] Bytes part(Bytes whole) const {
    return several() ? round_up((whole + work_.world - 1) / work_.world, kPage) : whole;
  }

  const Workload& work_;
};

}  // namespace ballast::schedule
