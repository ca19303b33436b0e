#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/step_program.h"

namespace ballast::step {

/// Finds values that must be recomputed before the passes of a stop, in the backward pass.
class Recomputation {
 public:
  /// `keeps`: by block, whether it keeps its values of model::Waits::kept; empty: none does.
  Recomputation(const model::StepProgram& program, std::vector<bool> keeps)
      : program_(program), keeps_(std::move(keeps)), there_(program.values.size(), false) {}

  [[nodiscard]] bool keeps(const model::StepValue& value) const {
    return value.waits == model::Waits::kept && !keeps_.empty() && keeps_[value.owner];
  }

  /// Begins the next micro-batches, of which nothing has been recomputed yet.
  void restart() { std::fill(there_.begin(), there_.end(), false); }

  /// Calls `run(stop)` for the stops of the recipes of all lost values that `stop` reads.
  template <class Run>
  void before(const model::Stop& stop, const Run& run) {
    if (!stop.backward) return;
    for_reads(stop, [&](model::ValueId value) {
      if (is_lost(value)) recompute(value, run);
    });
  }

 private:
  template <class Handle>
  void for_values(const model::Stop& stop, const Handle& handle) const {
    for (const model::PassId pass : stop.passes) {
      for (const model::Operand& operand : program_.passes[pass].operands) {
        if (operand.kind == model::OperandKind::value && !operand.optional) handle(operand);
      }
    }
  }
  template <class Handle>
  void for_reads(const model::Stop& stop, const Handle& handle) const {
    for_values(stop, [&](const model::Operand& operand) {
      if (operand.access != model::OperandAccess::writes) handle(operand.number);
    });
  }
  [[nodiscard]] bool is_lost(model::ValueId number) const {
    const model::StepValue& value = program_.values[number];
    if (value.recipe == model::kNone || there_[number]) return false;
    return value.waits == model::Waits::again ||
           (value.waits == model::Waits::kept && !keeps(value));
  }

  /// The recipes of values that the recipe reads come first, except for values that it writes
  /// itself. Afterwards only the requested value is available. Other values that the recipe writes
  /// must be requested separately, because another recipe may have overwritten them.
  template <class Run>
  void recompute(model::ValueId value, const Run& run) {
    const model::Recipe& recipe = program_.recipes[program_.values[value].recipe];
    std::vector<model::ValueId> written;
    for (const model::Stop& stop : recipe.stops) {
      for_values(stop, [&](const model::Operand& operand) {
        if (operand.access == model::OperandAccess::writes) written.push_back(operand.number);
      });
    }
    for (const model::Stop& stop : recipe.stops) {
      for_reads(stop, [&](model::ValueId read) {
        const bool own = std::find(written.begin(), written.end(), read) != written.end();
        if (!own && is_lost(read)) recompute(read, run);
      });
    }
    for (const model::Stop& stop : recipe.stops) run(stop);
    there_[value] = true;
  }

  const model::StepProgram& program_;
  std::vector<bool> keeps_;
  std::vector<bool> there_;  ///< by value: recomputed for the current micro-batches
};

/// Returns the stops of a list that belong to one form of the head.
std::vector<const model::Stop*> stops_of(const std::vector<model::Stop>& stops,
                                         model::HeadForm form);

/// Returns whether an operand is a copy in host memory, which readers of a routing use.
bool is_on_host(const model::StepProgram& program, const model::Operand& operand);

/// Assigns colours to values of BufferRule::own and to gradient sums: those with the same colour
/// share a buffer.
///
/// A life is an interval of stops, with all recipes expanded. Values of a class whose lives do not
/// overlap have the same colour. Colours depend on the program and the form of the head, but not on
/// a placement: they are computed as if nothing were kept.
struct Colours {
  std::vector<std::uint32_t> of_value;  ///< kNone: no pass uses it
  // By class: number of colours in a training step and in an evaluation.
  std::vector<std::uint32_t> training;
  std::vector<std::uint32_t> evaluation;
  /// By sum, if all micro-batches pass a stop before the next stop; kNone: no pass adds to it.
  std::vector<std::uint32_t> of_sum;
  std::uint32_t sums = 0;  ///< number of colours of sums
};

/// `trains`: for training steps and evaluations, otherwise only for evaluations.
Colours colour(const model::StepProgram& program, model::HeadForm form, bool trains);

/// Properties of a program's values that their buffers depend on, in addition to a placement.
/// Computed once per program, because planners list the buffers of thousands of placements.
class ProgramIndex {
 public:
  explicit ProgramIndex(model::StepProgram program);

  [[nodiscard]] const model::StepProgram& program() const { return program_; }
  [[nodiscard]] const Colours& colours(model::HeadForm form, bool trains) const {
    if (!trains) return evaluation_;
    return form == model::HeadForm::one_pass ? one_pass_ : visits_;
  }
  /// Numbers of the values of each kind, ascending.
  struct Values {
    std::vector<model::ValueId> placed;           ///< model::Waits::placed
    std::vector<model::ValueId> kept;             ///< model::Waits::kept
    std::vector<model::ValueId> kept_attention;   ///< model::Waits::kept_attention
    std::vector<model::ValueId> counts;           ///< row counts, which have a copy on the host
    std::vector<model::ValueId> reported_counts;  ///< row counts of the trained model
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
