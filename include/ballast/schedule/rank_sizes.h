#pragma once

#include <cstdint>

#include "ballast/core/weight_codes.h"
#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// How large everything of a block is on one rank under ZeRO's stages (arXiv 1910.02054, section
/// 5): optimizer states are split from stage 1, the gradients that wait for them from stage 2,
/// weights in stage 3, but for those of blocks that keep them whole. A part is one of `world` equal
/// parts of whole pages, so that the whole is padded behind the block's own bytes; rank r's part is
/// the r-th. One rank's part is exactly the block.
class RankSizes {
 public:
  explicit RankSizes(const Workload& workload) : work_(workload) {}

  [[nodiscard]] bool several() const { return work_.world > 1; }
  [[nodiscard]] bool splits_states() const { return several() && work_.stage >= 1; }
  [[nodiscard]] bool splits_gradients() const { return several() && work_.stage >= 2; }
  [[nodiscard]] bool splits_weights(std::uint32_t block) const {
    return several() && work_.stage >= 3 && !work_.blocks[block].keeps_whole;
  }
  /// Whether a rank updates just its part of weights that it keeps whole.
  [[nodiscard]] bool updates_part(std::uint32_t block) const {
    return splits_states() && !splits_weights(block);
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

  /// Weights where they live between uses.
  [[nodiscard]] Bytes weights(std::uint32_t block) const {
    return splits_weights(block) ? weight_part(block) : whole_weights(block);
  }
  /// Whether gathers of split weights move codes.
  [[nodiscard]] bool codes_weights() const { return work_.coded_weight > 0; }
  /// One rank's part as codes.
  [[nodiscard]] Bytes part_codes(std::uint32_t block) const {
    return WeightCodes::bytes_of(weight_part(block) / work_.coded_weight);
  }
  [[nodiscard]] Bytes whole_codes(std::uint32_t block) const {
    return work_.world * part_codes(block);
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

 private:
  [[nodiscard]] Bytes part(Bytes whole) const {
    return several() ? round_up((whole + work_.world - 1) / work_.world, kPage) : whole;
  }

  const Workload& work_;
};

}  // namespace ballast::schedule
