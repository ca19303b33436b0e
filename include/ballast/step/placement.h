#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/step/options.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Homes of the data of one block.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  /// The block's input between forward and backward, see ProgramTable::places_input(), and the
  /// values of Kept::attention.
  Tier activations = Tier::device;
  /// Layers: what stays from forward to backward; the rest is recomputed. The other blocks that
  /// keep something keep all or nothing. The second half of a layer in tiles: its input stays. The
  /// first block of a head with several tiles: their logits stay, see in_one_pass().
  Kept kept = Kept::nothing;
  /// With gated updates, for states below the device: the block is updated in the backward pass,
  /// assuming that the gate neither clips nor skips the step; see Schedule::rollback.
  bool speculates = false;
  /// The packed gradient until its update: host or nvme. A block with states on the device keeps it
  /// there.
  Tier gradients = Tier::host;
  friend bool operator==(const BlockPlacement&, const BlockPlacement&) = default;
};

struct Placement {
  std::vector<BlockPlacement> blocks;
};

/// Homes of weights and states, by tier.
struct Homes {
  bool device = true;
  bool host = true;
  bool nvme = true;

  [[nodiscard]] constexpr bool has(Tier tier) const {
    return tier == Tier::device ? device : (tier == Tier::host ? host : nvme);
  }
};
inline constexpr Homes kHomesInMemory = {.nvme = false};
constexpr Homes homes_on(Tier tier) {
  return {tier == Tier::device, tier == Tier::host, tier == Tier::nvme};
}

/// Returns whether the head handles all vocabulary tiles in one operation, so that no logit is
/// recomputed: with one tile, or if the head's first block keeps its intermediates and the whole
/// weights of all tiles are on one device.
bool in_one_pass(const Problem& problem, const Placement& placement);

/// Returns whether checkpoints are written while training continues: if some weights or states are
/// in host memory. With weights or states on NVMe this takes one more extent for each of them, so a
/// run that keeps one checkpoint waits instead. `kept`: number of checkpoints that stay.
bool written_in_background(const Placement& placement, std::uint64_t kept);

}  // namespace ballast::step
