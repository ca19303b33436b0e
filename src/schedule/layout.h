#pragma once

#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Every buffer of a run by its purpose. An id stands for a buffer in Layout::buffers; lists that a
/// placement does not need are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block.
  std::vector<BufferId> weight_home;
  std::vector<BufferId> state_home;
  std::vector<BufferId> gradient;     ///< packed, on the side where the block is updated
  std::vector<BufferId> accumulator;  ///< the same one for all blocks in layer-major order

  // Passing places, taken in turn.
  std::vector<BufferId> weight_slots;      ///< device
  std::vector<BufferId> weight_staging;    ///< host
  std::vector<BufferId> state_staging;     ///< host
  std::vector<BufferId> gradient_slots;    ///< device, packed gradients on their way to the host
  std::vector<BufferId> activation_slots;  ///< device, when activations live on the host

  // One per micro-batch.
  std::vector<BufferId> batch_host;
  std::vector<BufferId> batch_device;
  std::vector<BufferId> flow;  ///< gradient of the activation between two blocks
  /// [block][micro-batch], block >= 1: the block's input where it waits for the backward pass.
  std::vector<std::vector<BufferId>> input_home;

  BufferId tied_accumulator = kNoBuffer;
  BufferId results_device = kNoBuffer;
  BufferId results_host = kNoBuffer;
  BufferId workspace = kNoBuffer;
};

/// Lays out the buffers of `workload` under `placement`.
Layout make_layout(const Workload& workload, const Placement& placement, const Options& options);

}  // namespace ballast::schedule
