#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/step/buffer_list.h"
#include "src/step/lives.h"
#include "src/step/plan_types.h"

namespace ballast::step {

/// What the buffers of a program's values depend on besides a placement. It is computed once per
/// program, because planners ask for the buffers of thousands of placements.
class ValueTable {
 public:
  explicit ValueTable(std::shared_ptr<const model::StepProgram> program);

  [[nodiscard]] const model::StepProgram& program() const { return *program_; }
  [[nodiscard]] const Colours& colours(model::HeadForm form, bool trains) const {
    if (!trains) return evaluation_;
    return form == model::HeadForm::one_pass ? one_pass_ : visits_;
  }
  /// Numbers of the values of each kind, ascending.
  struct Values {
    std::vector<model::ValueId> placed;  ///< model::Waits::placed
    std::vector<model::ValueId> kept;    ///< model::Waits::kept
    std::vector<model::ValueId> counts;  ///< numbers of rows, which have a copy on the host
  };
  [[nodiscard]] const Values& values() const { return values_; }
  /// Of a class.
  struct Traits {
    std::vector<model::ValueId> others;  ///< values that do not wait for the backward pass
    std::uint32_t recomputed = 0;        ///< values of model::Waits::kept with a recipe
    std::uint32_t passing = 0;  ///< values in a schedule for evaluation alone, see in_evaluation
    bool of_reference = false;  ///< passes of a reference write them
  };
  [[nodiscard]] const Traits& traits(model::ClassId id) const { return traits_[id]; }

  /// The sums of a block's gradient. The first is cleared.
  [[nodiscard]] const std::vector<model::SumId>& sums_of(model::BlockId block) const {
    return sums_of_[block];
  }
  /// Blocks [begin, end).
  struct Blocks {
    model::BlockId begin = 0;
    model::BlockId end = 0;
  };
  /// The blocks that compute rows of the routing `value`.
  [[nodiscard]] Blocks counting_in(model::ValueId value) const { return counting_in_[value]; }
  /// Whether a pass writes numbers of rows, which the host reads.
  [[nodiscard]] bool writes_counts(model::PassId pass) const { return writes_counts_[pass]; }
  /// Passes that read the weights of several blocks, in a form of the head.
  [[nodiscard]] const std::vector<model::PassId>& passes_over_blocks(model::HeadForm form) const {
    return form == model::HeadForm::one_pass ? over_blocks_in_one_pass_ : over_blocks_in_visits_;
  }

 private:
  void number_values();
  void number_blocks();
  [[nodiscard]] std::vector<model::PassId> find_passes_over_blocks(model::HeadForm form) const;

  std::shared_ptr<const model::StepProgram> program_;
  Colours one_pass_;
  Colours visits_;
  Colours evaluation_;
  Values values_;
  std::vector<Traits> traits_;
  std::vector<std::vector<model::SumId>> sums_of_;  ///< by block
  std::vector<Blocks> counting_in_;                 ///< by value
  std::vector<bool> writes_counts_;                 ///< by pass
  std::vector<model::PassId> over_blocks_in_one_pass_;
  std::vector<model::PassId> over_blocks_in_visits_;
};

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

/// Bytes of a value of one micro-batch.
inline Bytes bytes_of(const model::StepProgram& program, const model::StepValue& value) {
  return value.bytes > 0 ? value.bytes : program.classes[value.of].bytes;
}
/// The same where it waits on NVMe, in whole pages.
inline Bytes swapped_bytes(const model::StepProgram& program, const model::StepValue& value) {
  return round_up(bytes_of(program, value), kPage);
}

/// Adds the buffers of values and gradient sums to `list`. If the list merges buffers, the members
/// by value stay empty.
ValueSlots add_values(const ValueTable& table, const ValueQuestion& question, BufferList& list);

}  // namespace ballast::step
