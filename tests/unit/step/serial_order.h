#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "ballast/model/step_program.h"

namespace ballast::step {

/// The passes of a micro-batch one after the other, without recomputation: each pass reads what the
/// last earlier pass has written.
class SerialOrder {
 public:
  SerialOrder(const model::StepProgram& program, const std::vector<model::Stop>& stops,
              model::HeadForm form)
      : program_(program),
        position_(program.passes.size(), model::kNone),
        additions_(program.sums.size(), 0) {
    std::vector<std::uint32_t> writer(program.values.size(), model::kNone);
    for (const model::Stop& stop : stops) {
      if (stop.form != model::HeadForm::any && stop.form != form) continue;
      for (const model::PassId id : stop.passes) {
        position_[id] = static_cast<std::uint32_t>(passes_.size());
        by_key_.try_emplace(key_of(program.passes[id]), position_[id]);
        before_.emplace_back();
        for (const model::Operand& operand : program.passes[id].operands) {
          if (operand.kind == model::OperandKind::gradient) ++additions_[operand.number];
          if (operand.kind != model::OperandKind::value) continue;
          std::uint32_t& last = writer[operand.number];
          before_.back().emplace_back(operand.number, last);
          if (operand.access != model::OperandAccess::writes) read_.emplace(last, operand.number);
          if (operand.access == model::OperandAccess::reads) continue;
          last = position_[id];
        }
        passes_.push_back(id);
        backward_.push_back(stop.backward);
      }
    }
    at_end_ = std::move(writer);
  }

  [[nodiscard]] const std::vector<model::PassId>& passes() const { return passes_; }
  [[nodiscard]] bool is_backward(std::uint32_t position) const { return backward_[position]; }
  /// The position of `pass`, or of the pass of the forward pass that it repeats; kNone if there is
  /// none.
  [[nodiscard]] std::uint32_t position_of(model::PassId pass) const {
    if (position_[pass] != model::kNone) return position_[pass];
    const auto found = by_key_.find(key_of(program_.passes[pass]));
    return found == by_key_.end() ? model::kNone : found->second;
  }
  /// The position of the pass that was the last to write `value` when the pass at `position`
  /// begins; kNone if none has.
  [[nodiscard]] std::uint32_t writer_before(std::uint32_t position, model::ValueId value) const {
    for (const auto& [id, writer] : before_[position]) {
      if (id == value) return writer;
    }
    return model::kNone;
  }
  /// Like writer_before(), after the last pass.
  [[nodiscard]] std::uint32_t last_writer(model::ValueId value) const { return at_end_[value]; }
  /// Whether a later pass reads `value` as written by the pass at `position`.
  [[nodiscard]] bool is_read(std::uint32_t position, model::ValueId value) const {
    return read_.contains({position, value});
  }
  /// Number of passes that add to a sum, per micro-batch.
  [[nodiscard]] std::uint32_t additions_to(model::SumId sum) const { return additions_[sum]; }

 private:
  using Key = std::tuple<model::Kernel, model::BlockId, std::uint32_t, std::uint8_t>;
  static Key key_of(const model::Pass& pass) {
    return {pass.kernel, pass.block, pass.number, pass.reference};
  }

  const model::StepProgram& program_;
  std::vector<model::PassId> passes_;
  std::vector<bool> backward_;
  std::vector<std::vector<std::pair<model::ValueId, std::uint32_t>>> before_;  ///< by position
  std::vector<std::uint32_t> position_;                                        ///< by pass
  std::vector<std::uint32_t> at_end_;                                          ///< by value
  std::map<Key, std::uint32_t> by_key_;
  std::set<std::pair<std::uint32_t, model::ValueId>> read_;
  std::vector<std::uint32_t> additions_;  ///< by sum
};

}  // namespace ballast::step
