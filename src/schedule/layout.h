#pragma once

#include <cstdint>
#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Every buffer of a run by its purpose. Ids index `buffers`; lists that a placement does not need
/// are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block. Purpose::evaluation has only the weights.
  std::vector<BufferId> weight_home;
  std::vector<std::vector<BufferId>> state_home;  ///< by sub-group
  /// For speculating blocks, else kNoBuffer: values before the last update; see Speculation.
  std::vector<BufferId> weight_undo;
  std::vector<std::vector<BufferId>> state_undo;  ///< by sub-group, or empty
  /// Packed, until its update: in the memory where the block is updated, or on NVMe; kNoBuffer if
  /// it is updated from staging (swaps_gradient() and eager).
  std::vector<BufferId> gradient;
  std::vector<BufferId> accumulator;  ///< one shared by all blocks in layer-major order
  std::vector<BufferId> statistics_device;
  std::vector<BufferId> statistics_host;

  // Buffers for data in transit.
  std::vector<BufferId> weight_slots;    ///< device, whole weights
  std::vector<BufferId> share_slots;     ///< device, this rank's share of split weights
  BufferId codes = kNoBuffer;            ///< device, gathered weight codes
  std::vector<BufferId> weight_staging;  ///< host
  std::vector<BufferId> state_staging;   ///< host, each as large as its largest content
  std::vector<BufferId> gradient_slots;  ///< device, packed gradients
  /// Device, for activations that leave it or, in an evaluation, for all.
  std::vector<BufferId> activation_slots;
  std::vector<BufferId> activation_staging;  ///< host, for activations on NVMe
  std::vector<BufferId> gradient_staging;    ///< host, for gradients on NVMe
  /// Host: weights and states on the device are filled and read through it, in pieces, outside of
  /// steps. A buffer of a step serves if one is large enough.
  BufferId passing_place = kNoBuffer;

  // One per micro-batch.
  std::vector<BufferId> batch_host;
  std::vector<BufferId> batch_device;
  std::vector<BufferId> flow;  ///< gradient of the activation between two blocks
  /// [block][micro-batch], block >= 1: the block's input between forward and backward pass. Empty
  /// for a head whose input uses activation_slots.
  std::vector<std::vector<BufferId>> input_home;
  /// [block][micro-batch]: empty for blocks that keep none.
  std::vector<std::vector<BufferId>> intermediates;

  /// [tile]: sums of the output matrix's gradient besides those of the blocks. Some tiles may share
  /// one. Empty if there are none.
  std::vector<BufferId> output_accumulator;
  /// [micro-batch]: see the roles; empty with one tile.
  std::vector<BufferId> head_rows;
  std::vector<BufferId> head_gradient;
  BufferId arriving = kNoBuffer;  ///< device, gradients received from other ranks
  BufferId losses_device = kNoBuffer;
  BufferId losses_host = kNoBuffer;
  BufferId verdict = kNoBuffer;
  BufferId workspace = kNoBuffer;
};

/// Whether the input of `block` leaves the device between forward and backward. The head's input
/// never does: it is consumed at once.
bool input_leaves(const Workload& workload, const Placement& placement, std::uint32_t block);

/// Of a layer.
bool keeps_intermediates(const Workload& workload, const Placement& placement, std::uint32_t block);

/// Whether the gradient of `block` passes through host staging instead of waiting in host memory.
bool swaps_gradient(const Placement& placement, std::uint32_t block);

/// The pass of a step in which blocks are updated: gated updates of the step before precede the
/// forward pass of their block, eager and speculative ones follow its backward pass.
enum class Pass : std::uint8_t { forward, backward };

Pass update_pass(const Placement& placement, const Options& options, std::uint32_t block);

struct SwappedStates {
  std::uint32_t block = 0;
  std::uint32_t sub_group = 0;
};

/// The sub-groups whose states live on NVMe and that are updated in `pass`, in update order. The
/// i-th of the forward pass, and after these the i-th of the backward pass, use state_staging in
/// turn.
std::vector<SwappedStates> swapped_states(const Workload& workload, const Placement& placement,
                                          const Options& options, Pass pass);

/// Bytes of a block's input on NVMe, in whole pages.
Bytes swapped_input_bytes(const Workload& workload);
/// The same for what this rank keeps of the gradient of `block`.
Bytes swapped_gradient_bytes(const Workload& workload, std::uint32_t block);

Layout make_layout(const Workload& workload, const Placement& placement, const Options& options);

/// See sum_buffers().
std::vector<Buffer> merged_buffers(const Workload& workload, const Placement& placement,
                                   const Options& options);

}  // namespace ballast::schedule
