#pragma once

#include <cstdint>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// What one rank holds of each block under ZeRO's stages: states are split from stage 1, gradients
/// with them (they are reduced to shards at once), weights from stage 3. A shard is an equal part
/// in whole pages, so that the last one may be padded.
class RankSizes {
 public:
  explicit RankSizes(const Workload& workload) : work_(workload) {}

  [[nodiscard]] bool several() const { return work_.world > 1; }
  [[nodiscard]] bool splits_states() const { return several() && work_.stage >= 1; }
  [[nodiscard]] bool splits_weights() const { return several() && work_.stage >= 3; }

  [[nodiscard]] Bytes weights(std::uint32_t block) const {
    return part(work_.blocks[block].weight_bytes, splits_weights());
  }
  [[nodiscard]] Bytes gradient(std::uint32_t block) const {
    return part(work_.blocks[block].gradient_bytes, splits_states());
  }
  [[nodiscard]] Bytes states(std::uint32_t block) const {
    return part(work_.blocks[block].state_bytes, splits_states());
  }
  /// The part of the weights that this rank updates.
  [[nodiscard]] Bytes updated_weights(std::uint32_t block) const {
    return part(work_.blocks[block].weight_bytes, splits_states());
  }
  [[nodiscard]] Bytes update_traffic(std::uint32_t block) const {
    const Bytes whole = work_.blocks[block].update_traffic;
    return splits_states() ? (whole + work_.world - 1) / work_.world : whole;
  }
  /// What this rank receives when `whole` bytes are gathered from, or scattered to, all ranks.
  [[nodiscard]] Bytes exchanged(Bytes whole) const {
    return several() ? whole - whole / work_.world : 0;
  }

 private:
  [[nodiscard]] Bytes part(Bytes whole, bool split) const {
    return split ? round_up((whole + work_.world - 1) / work_.world, kPage) : whole;
  }

  const Workload& work_;
};

}  // namespace ballast::schedule
