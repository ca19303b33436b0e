#include "ballast/step/program_index.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ballast::step {

using model::kNone;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::Stop;

namespace {

/// First and last stop of a life.
struct Life {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
};
using Lives = std::vector<Life>;

/// Assigns colours to lists of lives. Lives of one colour never overlap.
class Colouring {
 public:
  /// Returns the first colour that is free during all of `lives`.
  std::uint32_t add(const Lives& lives) {
    std::uint32_t colour = 0;
    while (colour < taken_.size() && !is_free(taken_[colour], lives)) ++colour;
    if (colour == taken_.size()) taken_.emplace_back();
    for (const Life& life : lives) taken_[colour].emplace(life.last, life.first);
    return colour;
  }
  [[nodiscard]] std::uint32_t size() const { return static_cast<std::uint32_t>(taken_.size()); }

 private:
  using Taken = std::map<std::uint32_t, std::uint32_t>;  ///< last stop of a life -> its first stop

  static bool is_free(const Taken& taken, const Lives& lives) {
    return std::none_of(lives.begin(), lives.end(), [&](const Life& life) {
      const auto next = taken.lower_bound(life.first);
      return next != taken.end() && next->second <= life.last;
    });
  }

  std::vector<Taken> taken_;  ///< by colour
};

/// Returns the numbers of those with lives, in the order in which they begin.
std::vector<std::uint32_t> in_order(const std::vector<Lives>& lives) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < lives.size(); ++i) {
    if (!lives[i].empty()) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return lives[a].front().first < lives[b].front().first;
  });
  return order;
}

/// Lives of all values and sums, over consecutive lists of stops.
class LifeTable {
 public:
  explicit LifeTable(const model::StepProgram& program)
      : values(program.values.size()),
        sums(program.sums.size()),
        program_(program),
        sums_of_(program.blocks.size()) {
    for (model::SumId s = 0; s < program.sums.size(); ++s) {
      sums_of_[program.sums[s].block].push_back(s);
    }
  }

  void follow(const std::vector<const Stop*>& stops) {
    Recomputation recomputation(program_, {});
    for (const Stop* stop : stops) {
      recomputation.before(*stop, [&](const Stop& again) { visit(again); });
      visit(*stop);
      for (const model::BlockId block : stop->finishes) finish(block, now_ - 1);
    }
  }
  [[nodiscard]] std::uint32_t now() const { return now_; }

  std::vector<Lives> values;
  std::vector<Lives> sums;

 private:
  void visit(const Stop& stop) {
    for (const model::PassId pass : stop.passes) {
      for (const Operand& operand : program_.passes[pass].operands) {
        if (operand.kind == OperandKind::gradient) extend(sums[operand.number], false);
        if (operand.kind != OperandKind::value || is_on_host(program_, operand)) continue;
        extend(values[operand.number], operand.access == OperandAccess::writes);
      }
    }
    ++now_;
  }
  void extend(Lives& lives, bool begins) const {
    if (begins || lives.empty()) {
      lives.push_back({now_, now_});
    } else {
      lives.back().last = now_;
    }
  }
  /// A sum is packed when the gradient of its block is complete.
  void finish(model::BlockId block, std::uint32_t at) {
    for (const model::SumId sum : sums_of_[block]) {
      if (!sums[sum].empty()) sums[sum].back().last = at;
    }
  }

  const model::StepProgram& program_;
  std::vector<std::vector<model::SumId>> sums_of_;  ///< by block
  std::uint32_t now_ = 0;
};

}  // namespace

std::vector<const Stop*> stops_of(const std::vector<Stop>& stops, model::HeadForm form) {
  std::vector<const Stop*> chosen;
  for (const Stop& stop : stops) {
    if (stop.form == model::HeadForm::any || stop.form == form) chosen.push_back(&stop);
  }
  return chosen;
}

bool is_on_host(const model::StepProgram& program, const Operand& operand) {
  return operand.kind == OperandKind::value && operand.access == OperandAccess::reads &&
         program.classes[program.values[operand.number].of].counts;
}

Colours colour(const model::StepProgram& program, model::HeadForm form, bool trains) {
  LifeTable table(program);
  if (trains) table.follow(stops_of(program.training, form));
  const std::uint32_t end_of_training = table.now();
  table.follow(stops_of(program.evaluation, model::HeadForm::visits));

  Colours colours = {.of_value = std::vector<std::uint32_t>(program.values.size(), kNone),
                     .training = std::vector<std::uint32_t>(program.classes.size(), 0),
                     .evaluation = std::vector<std::uint32_t>(program.classes.size(), 0),
                     .of_sum = std::vector<std::uint32_t>(program.sums.size(), kNone)};
  std::vector<Colouring> classes(program.classes.size());
  for (const std::uint32_t value : in_order(table.values)) {
    const Lives& lives = table.values[value];
    const model::ClassId of = program.values[value].of;
    const std::uint32_t number = classes[of].add(lives);
    colours.of_value[value] = number;
    const auto count = [&](std::vector<std::uint32_t>& most) {
      most[of] = std::max(most[of], number + 1);
    };
    if (lives.front().first < end_of_training) count(colours.training);
    if (lives.back().last >= end_of_training) count(colours.evaluation);
  }
  // Cleared sums come first, one per block, so that most of them need one buffer.
  Colouring sums;
  for (const bool clears : {true, false}) {
    for (const std::uint32_t sum : in_order(table.sums)) {
      if (program.sums[sum].clears == clears) colours.of_sum[sum] = sums.add(table.sums[sum]);
    }
  }
  colours.sums = sums.size();
  return colours;
}

using model::ClassId;
using model::HeadForm;
using model::StepValue;
using model::ValueClass;
using model::ValueId;
using model::Waits;

ProgramIndex::ProgramIndex(model::StepProgram program)
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

void ProgramIndex::number_values() {
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

void ProgramIndex::number_blocks() {
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
  for (const ValueId v : values_.counts) {
    if (counting_in_[v].end > 0) values_.reported_counts.push_back(v);
  }
}

std::vector<model::PassId> ProgramIndex::find_passes_over_blocks(HeadForm form) const {
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
