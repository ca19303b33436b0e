#include "ballast/step/lives.h"

#include <algorithm>
#include <map>

#include "src/step/recomputation.h"

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

}  // namespace ballast::step
