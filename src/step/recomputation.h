#pragma once

#include <algorithm>
#include <utility>
#include <vector>

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

}  // namespace ballast::step
