#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/step/buffer_list.h"
#include "src/step/placed_problem.h"
#include "src/step/plan_types.h"

namespace ballast::step {

/// The buffers that values share on one device.
struct DeviceValues {
  using Buffers = std::vector<BufferId>;

  // By class.
  /// By SlotRule: own: colour * together + micro-batch; in_turn: a ring; scratch: one; step: by
  /// micro-batch.
  std::vector<Buffers> shared;
  std::vector<Buffers> leaving;   ///< a ring, for values that only other devices read
  std::vector<Buffers> of_ranks;  ///< row counts of all ranks, if there are several

  BufferId report = kNoBuffer;  ///< one for all classes
};

/// The buffers of values and of gradient sums.
struct ValueSlots {
  using Buffers = std::vector<BufferId>;

  std::vector<DeviceValues> devices;
  std::vector<Buffers> on_host;  ///< inputs of the step, by class and micro-batch
  // By value.
  /// Waiting for the backward pass, by micro-batch together; on the device of its owner, or below.
  std::vector<Buffers> own;
  std::vector<BufferId> counts;  ///< row counts of all micro-batches and ranks, on the host

  BufferId report_on_host = kNoBuffer;  ///< copy of the report on the device of the head
  Buffers staging;                      ///< host, for values that wait on NVMe

  // By gradient sum. With Order::micro_batch_major_offload, `sums` has no buffers, and only then
  // the others are used.
  std::vector<BufferId> sums;          ///< on the device
  std::vector<BufferId> sums_on_host;  ///< homes between micro-batches
  std::vector<std::uint32_t> ring_of;  ///< index of its ring
  std::vector<Buffers> sum_rings;      ///< on the device, for the sums of several blocks in turn
};

/// Returns the bytes of a value of one micro-batch that this rank keeps while it waits for the
/// backward pass. Parts are whole pages.
inline Bytes waiting_bytes(const Problem& problem, const model::StepValue& value) {
  const Bytes whole = problem.program().bytes_of(value);
  if (!is_partitioned(problem, value)) return whole;
  return round_up((whole + problem.tensor - 1) / problem.tensor, kPage);
}
/// Returns the bytes that it takes on NVMe, in whole pages.
inline Bytes swapped_bytes(const Problem& problem, const model::StepValue& value) {
  return round_up(waiting_bytes(problem, value), kPage);
}

/// Adds the buffers of values and gradient sums to `list`. If the list merges buffers, the members
/// by value stay empty.
ValueSlots add_values(const PlacedProblem& placed, BufferList& list);

}  // namespace ballast::step
