#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "ballast/model/step_program.h"
#include "ballast/plan/plan.h"
#include "ballast/step/problem.h"

#include "src/step/devices.h"

namespace ballast::step {

/// Whether the head of the trained model is one pass: its first block keeps what one pass needs,
/// and the whole weights of all tiles are on the device of that block.
inline model::HeadForm form_of(const Problem& problem, const Placement& placement) {
  const std::optional<model::OnePassHead>& head = problem.program().one_pass;
  const std::vector<std::uint8_t> dealt = deal(problem.program(), problem.devices);
  const auto is_there = [&](model::BlockId block) {
    const bool split = RankSizes(problem).shards_weights(block);
    return placement.blocks[block].weights == Tier::device && !split &&
           dealt[block] == dealt[head->keeper];
  };
  const bool one = !head || (placement.blocks[head->keeper].kept == Kept::all &&
                             std::all_of(head->on_device.begin(), head->on_device.end(), is_there));
  return one ? model::HeadForm::one_pass : model::HeadForm::visits;
}

/// Returns the cost that an operation names.
inline model::PassCost cost_of(const plan::Operation& op) {
  return {op.flops, op.traffic,        op.attention_flops, op.attention_backward_flops,
          op.bytes, op.adapter_traffic};
}

/// Returns whether an operation has the operand of its pass: optional ones are kept values.
inline bool is_bound(const model::StepProgram& program, const Placement& placement,
                     const model::Operand& operand) {
  if (!operand.optional) return true;
  const model::StepValue& value = program.values[operand.number];
  const bool attention = value.waits == model::Waits::kept_attention;
  return placement.blocks[value.owner].kept == (attention ? Kept::attention : Kept::all);
}

/// Returns the cost of a pass with what the placement keeps.
inline model::PassCost cost_of(const model::StepProgram& program, const Placement& placement,
                               const model::Pass& pass) {
  model::PassCost cost = pass.cost;
  for (const model::Operand& operand : pass.operands) {
    if (!is_bound(program, placement, operand)) {
      cost += operand.absent;
    } else {
      cost -= operand.spared;
    }
  }
  return cost;
}

/// The passes of a micro-batch one after the other, without anything that is computed again: what
/// each of them reads is what the last pass before it has written.
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
  /// Where `pass` runs, or the pass of the forward pass that it repeats; kNone: there is none.
  [[nodiscard]] std::uint32_t position_of(model::PassId pass) const {
    if (position_[pass] != model::kNone) return position_[pass];
    const auto found = by_key_.find(key_of(program_.passes[pass]));
    return found == by_key_.end() ? model::kNone : found->second;
  }
  /// The position of the pass that has written `value` last when the pass at `position` begins;
  /// kNone: none of them has.
  [[nodiscard]] std::uint32_t writer_before(std::uint32_t position, model::ValueId value) const {
    for (const auto& [id, writer] : before_[position]) {
      if (id == value) return writer;
    }
    return model::kNone;
  }
  /// The last pass that writes `value`.
  [[nodiscard]] std::uint32_t last_writer(model::ValueId value) const { return at_end_[value]; }
  /// Whether a pass reads `value` as the pass at `position` leaves it.
  [[nodiscard]] bool is_read(std::uint32_t position, model::ValueId value) const {
    return read_.contains({position, value});
  }
  /// Passes that add to a sum for each micro-batch.
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
