#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/schedule/workload.h"

namespace ballast::schedule {

/// Where the states of one block live between uses.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  /// The block's input between forward and backward, see Workload::places_input().
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

/// Whether the head handles all tiles of the vocabulary in one operation, so that no logit is
/// computed twice: with one tile, or where the head's first block keeps its intermediates and the
/// whole weights of all tiles live on the device.
bool in_one_pass(const Workload& workload, const Placement& placement);

/// Whether a checkpoint is written while training continues: some weights or states are in host
/// memory. With weights or states on NVMe this takes a further extent for each of them, so a run
/// that keeps one checkpoint waits instead. `kept`: number of checkpoints that stay.
bool written_in_background(const Placement& placement, std::uint64_t kept);

enum class Order : std::uint8_t {
  layer_major,       ///< every micro-batch of a block before the next block
  micro_batch_major  ///< every block of a micro-batch before the next micro-batch
};

enum class Update : std::uint8_t {
  gated,  ///< after the global gradient norm is known: during the next step's forward pass
  eager   ///< as soon as the block's own gradient is complete: during the backward pass
};

/// Which experts a step updates.
enum class ExpertUpdates : std::uint8_t {
  all,     ///< every one: without rows its gradient is zero
  touched  ///< those to which a token of the step was sent; the others keep weights and moments
};

enum class Purpose : std::uint8_t {
  training,
  /// Losses alone: weights, one activation per micro-batch and a workspace. No optimizer states,
  /// gradients or inputs for a backward pass.
  evaluation
};

struct Options {
  Purpose purpose = Purpose::training;
  Order order = Order::layer_major;
  Update update = Update::gated;
  ExpertUpdates expert_updates = ExpertUpdates::all;
  /// Weights of experts move before their router has chosen: those of experts that had rows in the
  /// micro-batch or step before.
  bool prefetches_experts = false;
  std::uint32_t weight_slots = 2;        ///< device buffers for weights in transit, at least 1
  std::uint32_t gradient_slots = 2;      ///< device buffers for gradients in transit, at least 1
  std::uint32_t weight_staging = 3;      ///< host buffers for weights in transit, at least 1
  std::uint32_t state_staging = 3;       ///< host buffers for states from NVMe, at least 1
  std::uint32_t activation_staging = 3;  ///< host buffers for activations to NVMe, at least 1
  std::uint32_t gradient_staging = 3;    ///< host buffers for gradients to NVMe, at least 1
  /// Complete checkpoints that keep weights and states where they are on NVMe, at a time. A further
  /// one may be incomplete: see written_in_background().
  std::uint32_t kept_checkpoints = 0;
  friend bool operator==(const Options&, const Options&) = default;
};

}  // namespace ballast::schedule
