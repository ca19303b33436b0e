#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/step/buffer_list.h"
#include "src/step/placed_problem.h"
#include "src/step/plan_types.h"

namespace ballast::step {

/// The buffers of values and of gradient sums.
struct ValueSlots {
  using Buffers = std::vector<BufferId>;

  // By class.
  /// On the device, by SlotRule: own: colour * together + micro-batch; in_turn: a ring; scratch and
  /// report: one; step: by micro-batch.
  std::vector<Buffers> shared;
  std::vector<Buffers> on_host;   ///< inputs of the step, by micro-batch
  std::vector<Buffers> of_ranks;  ///< row counts of all ranks on the device, if there are several
  // By value.
  std::vector<Buffers> own;      ///< waiting for the backward pass, by micro-batch together
  std::vector<BufferId> counts;  ///< row counts of all micro-batches and ranks, on the host

  BufferId report = kNoBuffer;          ///< device, one for all classes
  BufferId report_on_host = kNoBuffer;  ///< its copy
  Buffers staging;                      ///< host, for values that wait on NVMe
  std::vector<BufferId> sums;
};

/// Returns the bytes of a waiting value of one micro-batch on NVMe, in whole pages.
inline Bytes swapped_bytes(const model::StepProgram& program, const model::StepValue& value) {
  return round_up(program.bytes_of(value), kPage);
}

/// Adds the buffers of values and gradient sums to `list`. If the list merges buffers, the members
/// by value stay empty.
ValueSlots add_values(const PlacedProblem& placed, BufferList& list);

}  // namespace ballast::step
