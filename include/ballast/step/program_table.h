#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/step_program.h"
#include "ballast/step/lives.h"

namespace ballast::step {

/// Properties of a program's values that their buffers depend on, in addition to a placement.
/// Computed once per program, because planners list the buffers of thousands of placements.
class ProgramTable {
 public:
  explicit ProgramTable(model::StepProgram program);

  [[nodiscard]] const model::StepProgram& program() const { return program_; }
  [[nodiscard]] const Colours& colours(model::HeadForm form, bool trains) const {
    if (!trains) return evaluation_;
    return form == model::HeadForm::one_pass ? one_pass_ : visits_;
  }
  /// Numbers of the values of each kind, ascending.
  struct Values {
    std::vector<model::ValueId> placed;          ///< model::Waits::placed
    std::vector<model::ValueId> kept;            ///< model::Waits::kept
    std::vector<model::ValueId> kept_attention;  ///< model::Waits::kept_attention
    std::vector<model::ValueId> counts;          ///< row counts, which have a copy on the host
  };
  [[nodiscard]] const Values& values() const { return values_; }
  /// Properties of a class.
  struct Traits {
    std::vector<model::ValueId> others;  ///< values that do not wait for the backward pass
    std::uint32_t recomputed = 0;        ///< number of values of model::Waits::kept with a recipe
    std::uint32_t passing = 0;           ///< values if a schedule only evaluates, see in_evaluation
    bool of_reference = false;           ///< written by passes of a reference model
    bool of_attention = false;           ///< model::Waits::kept_attention
  };
  [[nodiscard]] const Traits& traits(model::ClassId id) const { return traits_[id]; }

  /// Returns whether the input of `block` waits for the backward pass in the tier of its placement.
  [[nodiscard]] bool places_input(std::size_t block) const { return places_input_[block]; }
  /// Returns whether the placement may keep intermediates of `block`, a layer or a part of one, on
  /// the device.
  [[nodiscard]] bool keeps_intermediates(std::size_t block) const { return keeps_[block]; }
  /// Returns whether the placement may keep attention of `block`, a layer, without the rest.
  [[nodiscard]] bool keeps_attention(std::size_t block) const { return keeps_attention_[block]; }
  /// Returns whether the placement may keep logits: `block` begins a head with several tiles.
  [[nodiscard]] bool keeps_logits(std::size_t block) const {
    return program_.one_pass && program_.one_pass->keeper == block;
  }
  /// Returns whether a step has passes of a reference model.
  [[nodiscard]] bool has_reference() const { return has_reference_; }
  /// Returns whether BlockPlacement::kept has an effect on `block`.
  [[nodiscard]] bool may_keep(std::size_t block) const {
    return keeps_intermediates(block) || keeps_logits(block);
  }
  /// Returns the bytes of one router's counts for a micro-batch on the host; 0 without experts.
  [[nodiscard]] Bytes routing_bytes() const {
    return values_.counts.empty() ? 0 : program_.bytes_of(program_.values[values_.counts.front()]);
  }

  /// Returns the sums of a block's gradient. The first is cleared.
  [[nodiscard]] const std::vector<model::SumId>& sums_of(model::BlockId block) const {
    return sums_of_[block];
  }
  /// Blocks [begin, end).
  struct Blocks {
    model::BlockId begin = 0;
    model::BlockId end = 0;
  };
  /// Returns the blocks that compute rows of the routing `value`.
  [[nodiscard]] Blocks counting_in(model::ValueId value) const { return counting_in_[value]; }
  /// Returns whether a pass writes row counts, which the host reads.
  [[nodiscard]] bool writes_counts(model::PassId pass) const { return writes_counts_[pass]; }
  /// Returns the passes that read the weights of several blocks, in a form of the head.
  [[nodiscard]] const std::vector<model::PassId>& passes_over_blocks(model::HeadForm form) const {
    return form == model::HeadForm::one_pass ? over_blocks_in_one_pass_ : over_blocks_in_visits_;
  }

 private:
  void number_values();
  void number_blocks();
  [[nodiscard]] std::vector<model::PassId> find_passes_over_blocks(model::HeadForm form) const;

  model::StepProgram program_;
  Colours one_pass_;
  Colours visits_;
  Colours evaluation_;
  Values values_;
  std::vector<Traits> traits_;
  bool has_reference_ = false;
  std::vector<bool> places_input_;                  ///< by block
  std::vector<bool> keeps_;                         ///< by block
  std::vector<bool> keeps_attention_;               ///< by block
  std::vector<std::vector<model::SumId>> sums_of_;  ///< by block
  std::vector<Blocks> counting_in_;                 ///< by value
  std::vector<bool> writes_counts_;                 ///< by pass
  std::vector<model::PassId> over_blocks_in_one_pass_;
  std::vector<model::PassId> over_blocks_in_visits_;
};

}  // namespace ballast::step
