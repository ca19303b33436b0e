#include "ballast/step/program_table.h"

#include <algorithm>
#include <utility>

namespace ballast::step {

using model::ClassId;
using model::HeadForm;
using model::kNone;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::StepValue;
using model::ValueClass;
using model::ValueId;
using model::Waits;

ProgramTable::ProgramTable(model::StepProgram program)
    : program_(std::move(program)),
      one_pass_(colour(program_, HeadForm::one_pass, true)),
      visits_(colour(program_, HeadForm::visits, true)),
      evaluation_(colour(program_, HeadForm::visits, false)),
      traits_(program_.classes.size()),
      places_input_(program_.blocks.size(), false),
      keeps_(program_.blocks.size(), false),
      keeps_attention_(program_.blocks.size(), false),
      sums_of_(program_.blocks.size()),
      counting_in_(program_.values.size()),
      writes_counts_(program_.passes.size(), false),
      over_blocks_in_one_pass_(find_passes_over_blocks(HeadForm::one_pass)),
      over_blocks_in_visits_(find_passes_over_blocks(HeadForm::visits)) {
  number_values();
  number_blocks();
}

void ProgramTable::number_values() {
  for (ValueId v = 0; v < program_.values.size(); ++v) {
    const StepValue& value = program_.values[v];
    const ValueClass& of = program_.classes[value.of];
    Traits& traits = traits_[value.of];
    if (of.counts) values_.counts.push_back(v);
    if (value.waits == Waits::placed) {
      values_.placed.push_back(v);
      places_input_[value.owner] = true;
    }
    if (value.waits == Waits::kept) {
      keeps_[value.owner] = true;
      values_.kept.push_back(v);
      if (value.recipe != kNone) ++traits.recomputed;
    } else if (value.waits == Waits::kept_attention) {
      keeps_attention_[value.owner] = true;
      values_.kept_attention.push_back(v);
      traits.of_attention = true;
    } else if (value.waits != Waits::placed) {
      traits.others.push_back(v);
    }
    ++traits_[of.in_evaluation == kNone ? value.of : of.in_evaluation].passing;
  }
  for (model::PassId id = 0; id < program_.passes.size(); ++id) {
    const model::Pass& pass = program_.passes[id];
    has_reference_ = has_reference_ || pass.reference > 0;
    for (const Operand& operand : pass.operands) {
      const bool writes =
          operand.kind == OperandKind::value && operand.access == OperandAccess::writes;
      if (!writes) continue;
      const ClassId of = program_.values[operand.number].of;
      if (pass.reference > 0) traits_[of].of_reference = true;
      if (program_.classes[of].counts) writes_counts_[id] = true;
    }
  }
}

void ProgramTable::number_blocks() {
  for (const bool clears : {true, false}) {
    for (model::SumId s = 0; s < program_.sums.size(); ++s) {
      const model::GradientSum& sum = program_.sums[s];
      if (sum.clears == clears) sums_of_[sum.block].push_back(s);
    }
  }
  for (model::BlockId b = 0; b < program_.blocks.size(); ++b) {
    const std::optional<model::RowCount>& rows = program_.blocks[b].rows;
    if (!rows) continue;
    Blocks& counting = counting_in_[rows->routing];
    if (counting.end == 0) counting.begin = b;
    counting.end = b + 1;
  }
}

std::vector<model::PassId> ProgramTable::find_passes_over_blocks(HeadForm form) const {
  std::vector<model::PassId> found;
  const auto look = [&](const std::vector<const model::Stop*>& stops) {
    for (const model::Stop* stop : stops) {
      for (const model::PassId id : stop->passes) {
        const std::vector<Operand>& operands = program_.passes[id].operands;
        const auto blocks = std::count_if(
            operands.begin(), operands.end(),
            [](const Operand& operand) { return operand.kind == OperandKind::weights; });
        if (blocks > 1) found.push_back(id);
      }
    }
  };
  look(stops_of(program_.training, form));
  look(stops_of(program_.evaluation, HeadForm::visits));
  return found;
}

}  // namespace ballast::step
