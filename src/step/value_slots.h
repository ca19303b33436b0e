#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"
#include "ballast/step/program_table.h"

#include "src/step/buffer_list.h"
#include "src/step/plan_types.h"

namespace ballast::step {

/// What decides about the buffers of values besides the program.
struct ValueQuestion {
  const Placement& placement;
  const Options& options;
  model::HeadForm form;
  std::uint32_t step_micro_batches;        ///< of a training step
  std::uint32_t evaluation_micro_batches;  ///< of an evaluation
  std::uint32_t ranks;

  [[nodiscard]] bool trains() const { return options.purpose == Purpose::training; }
  /// Whether `value` leaves the device between forward and backward pass.
  [[nodiscard]] bool leaves(const model::StepValue& value) const {
    return trains() && value.waits == model::Waits::placed &&
           placement.blocks[value.owner].activations != Tier::device;
  }
  /// Whether `value` has a buffer of its own on the device from forward to backward pass.
  [[nodiscard]] bool keeps(const model::StepValue& value) const {
    return trains() && value.waits == model::Waits::kept &&
           placement.blocks[value.owner].keeps_intermediates;
  }
  /// Micro-batches of the largest plan, and those that go through a stop before the next stop.
  [[nodiscard]] std::uint32_t micro_batches() const {
    return trains() ? step_micro_batches : evaluation_micro_batches;
  }
  [[nodiscard]] std::uint32_t together() const { return together(micro_batches()); }
  [[nodiscard]] std::uint32_t together(std::uint32_t micro_batches) const {
    return options.order == Order::layer_major ? micro_batches : 1;
  }
};

/// The buffers of values and of gradient sums.
struct ValueSlots {
  using Buffers = std::vector<BufferId>;

  // By class.
  /// On the device, by SlotRule: own: colour * together + micro-batch; in_turn: a ring; scratch and
  /// report: one; step: by micro-batch.
  std::vector<Buffers> shared;
  std::vector<Buffers> on_host;   ///< inputs of the step, by micro-batch
  std::vector<Buffers> of_ranks;  ///< numbers of rows of all ranks, on the device, if several
  // By value.
  std::vector<Buffers> own;  ///< where a value waits for the backward pass, by micro-batch together
  std::vector<BufferId> counts;  ///< numbers of rows of all micro-batches and ranks, on the host

  BufferId report = kNoBuffer;          ///< device, one for all classes
  BufferId report_on_host = kNoBuffer;  ///< its copy
  Buffers staging;                      ///< host, for values that wait on NVMe
  std::vector<BufferId> sums;
};

/// Bytes of a value of one micro-batch where it waits on NVMe, in whole pages.
inline Bytes swapped_bytes(const model::StepProgram& program, const model::StepValue& value) {
  return round_up(program.bytes_of(value), kPage);
}

/// Adds the buffers of values and gradient sums to `list`. If the list merges buffers, the members
/// by value stay empty.
ValueSlots add_values(const ProgramTable& table, const ValueQuestion& question, BufferList& list);

}  // namespace ballast::step
