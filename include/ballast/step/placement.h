#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/step/options.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Where the states of one block live between uses.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  /// The block's input between forward and backward, see Problem::places_input().
  Tier activations = Tier::device;
  /// Layers: intermediates stay on the device from forward to backward, else they are recomputed.
  /// The second half of a layer that is cut: its input does.
  /// The first block of a head of several tiles: their logits do, see in_one_pass().
  bool keeps_intermediates = false;
  /// With gated updates, for states below the device: the block is updated in the backward pass, in
  /// the expectation that the gate neither clips nor skips the step; see Schedule::rollback.
  bool speculates = false;
  /// The packed gradient until its update: host or nvme. That of a block with states on the device
  /// waits there.
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

/// Whether the head handles all tiles of the vocabulary in one operation, so that no logit is
/// computed twice: with one tile, or where the head's first block keeps its intermediates and the
/// whole weights of all tiles live on the device.
bool in_one_pass(const Problem& problem, const Placement& placement);

/// Whether a checkpoint is written while training continues: some weights or states are in host
/// memory. With weights or states on NVMe this takes a further extent for each of them, so a run
/// that keeps one checkpoint waits instead. `kept`: number of checkpoints that stay.
bool written_in_background(const Placement& placement, std::uint64_t kept);

}  // namespace ballast::step
