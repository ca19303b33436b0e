#pragma once

#include <cstdint>
#include <vector>

#include "src/step/placed_problem.h"
#include "src/step/plan_types.h"
#include "src/step/value_slots.h"

namespace ballast::step {

/// Buffers that each device has for data in transit and in use.
struct DevicePlaces {
  std::vector<BufferId> weight_slots;    ///< whole weights
  std::vector<BufferId> table_rows;      ///< rows of tables for one micro-batch
  std::vector<BufferId> row_gradients;   ///< their gradients
  std::vector<BufferId> share_slots;     ///< this rank's share of split weights
  BufferId codes = kNoBuffer;            ///< gathered weight codes
  std::vector<BufferId> dequantized;     ///< weights dequantised for passes; at most one
  std::vector<BufferId> gradient_slots;  ///< packed gradients
  BufferId received = kNoBuffer;         ///< gradients received from other ranks
  BufferId workspace = kNoBuffer;
};

/// Every buffer of a run by its purpose. Ids index `buffers`; lists that a placement does not need
/// are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block. Purpose::evaluation has only the weights.
  std::vector<BufferId> weight_home;
  std::vector<BufferId>
      trained_home;  ///< PlacedProblem::has_separate_trained_home(), else kNoBuffer
  std::vector<std::vector<BufferId>> state_home;  ///< by sub-group
  /// Values before the last update, for speculating blocks, else kNoBuffer; see Speculation.
  std::vector<BufferId> weight_undo;
  std::vector<std::vector<BufferId>> state_undo;  ///< by sub-group, or empty
  /// Packed gradient until its update: in the memory where the block is updated, or on NVMe;
  /// kNoBuffer if it is updated from staging (PlacedProblem::swaps_gradient() and eager).
  std::vector<BufferId> gradient;
  std::vector<BufferId> statistics_device;
  std::vector<BufferId> statistics_host;

  std::vector<DevicePlaces> devices;

  // Buffers for data in transit on the host.
  std::vector<BufferId> weight_staging;
  std::vector<BufferId> state_staging;     ///< each as large as its largest content
  std::vector<BufferId> gradient_staging;  ///< for gradients on NVMe
  std::vector<BufferId> table_rows;        ///< rows of tables for one micro-batch
  std::vector<BufferId> row_gradients;     ///< their gradients, until the gradient is packed
  std::vector<BufferId> scattered;         ///< packed gradients of tables, summed over the ranks
  /// Host buffer through which weights and states on the device are filled and read, in pieces,
  /// outside steps. It may be a buffer of a step that is large enough.
  BufferId fill_staging = kNoBuffer;

  ValueSlots values;  ///< values of the passes

  BufferId decision = kNoBuffer;
};

Layout make_layout(const PlacedProblem& placed);

/// See sum_buffers().
std::vector<Buffer> merged_buffers(const PlacedProblem& placed);

}  // namespace ballast::step
