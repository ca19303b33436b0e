#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/support/step_programs.h"

namespace ballast::model {
namespace {

/// The lines of check() without duplicates.
class BreachList {
 public:
  template <class... Values>
  void require(bool holds, fmt::format_string<Values...> message, Values&&... values) {
    if (holds) return;
    std::string line = fmt::format(message, std::forward<Values>(values)...);
    if (std::find(lines_.begin(), lines_.end(), line) == lines_.end()) {
      lines_.push_back(std::move(line));
    }
  }
  [[nodiscard]] const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

/// Checks that all numbers in the program refer to something. Other checks rely on it.
class NumberCheck {
 public:
  NumberCheck(const StepProgram& program, BreachList& breaches)
      : program_(program), breaches_(breaches) {}

  void run() {
    for (const StepValue& value : program_.values) {
      breaches_.require(value.of < program_.classes.size(), "value '{}' has no class", value.name);
      breaches_.require(value.owner < program_.blocks.size(), "value '{}' has no owner",
                        value.name);
      breaches_.require(value.recipe == kNone || value.recipe < program_.recipes.size(),
                        "value '{}' has an invalid recipe", value.name);
    }
    for (const ValueClass& one : program_.classes) {
      breaches_.require(one.in_evaluation == kNone || one.in_evaluation < program_.classes.size(),
                        "class '{}' has an invalid class for evaluations", one.name);
    }
    for (const GradientSum& sum : program_.sums) {
      breaches_.require(sum.block < program_.blocks.size(), "a gradient sum has no block");
    }
    for (const Pass& pass : program_.passes) check_operands(pass);
    for (const Recipe& recipe : program_.recipes) check_stops(recipe.stops);
    check_stops(program_.training);
    check_stops(program_.evaluation);
    breaches_.require(program_.head < program_.blocks.size(), "there is no head");
  }

 private:
  [[nodiscard]] std::size_t count_of(OperandKind kind) const {
    switch (kind) {
      case OperandKind::weights:
      case OperandKind::rows:
        return program_.blocks.size();
      case OperandKind::value:
        return program_.values.size();
      case OperandKind::gradient:
        return program_.sums.size();
      case OperandKind::workspace:
        break;
    }
    return 1;
  }

  void check_operands(const Pass& pass) {
    breaches_.require(pass.block < program_.blocks.size(), "{}: no such block",
                      to_string(pass.kernel));
    for (const Operand& operand : pass.operands) {
      breaches_.require(operand.number < count_of(operand.kind), "{}: {} has an invalid number",
                        to_string(pass.kernel), to_string(operand.port));
    }
  }

  void check_stops(const std::vector<Stop>& stops) {
    for (const Stop& stop : stops) {
      for (const PassId pass : stop.passes) {
        breaches_.require(pass < program_.passes.size(), "a stop has the invalid pass {}", pass);
      }
      for (const BlockId block : stop.finishes) {
        breaches_.require(block < program_.blocks.size(), "a stop finishes the invalid block {}",
                          block);
      }
    }
  }

  const StepProgram& program_;
  BreachList& breaches_;
};

/// Follows one list of stops for one form of the head, as a step does for one micro-batch, and
/// tracks which values exist. `keeps`: what the placement keeps of all blocks.
class Walk {
 public:
  enum class Keeps : std::uint8_t { nothing, attention, all };
  struct Choice {
    HeadForm form = HeadForm::any;
    Keeps keeps = Keeps::nothing;
  };

  Walk(const StepProgram& program, Choice choice, BreachList& breaches)
      : program_(program),
        choice_(choice),
        breaches_(breaches),
        alive_(program.values.size(), false),
        written_(program.values.size(), false) {}

  void train() {
    begin();
    for (const Stop& stop : program_.training) {
      if (!is_chosen(stop)) continue;
      if (stop.backward && !backward_) turn();
      breaches_.require(stop.backward || !backward_, "a forward stop follows a backward one");
      prepare(stop);
      go_through(stop, false);
      finish(stop);
    }
    check_finished();
    for (SumId sum = 0; sum < program_.sums.size(); ++sum) {
      // Only one form visits a tied tile twice.
      const bool other_form = !program_.sums[sum].clears && choice_.form != HeadForm::visits;
      breaches_.require(added_.contains(sum) || other_form,
                        "nothing adds to the gradient sum of {}", name(program_.sums[sum].block));
    }
  }

  void evaluate() {
    begin();
    for (const Stop& stop : program_.evaluation) {
      breaches_.require(stop.form == HeadForm::any, "an evaluation has one form");
      breaches_.require(!stop.backward && stop.finishes.empty(),
                        "an evaluation has no backward pass");
      for (const PassId id : stop.passes) {
        for (const Operand& operand : program_.passes[id].operands) {
          breaches_.require(operand.kind != OperandKind::gradient,
                            "{} of {} has a gradient in an evaluation", kernel(id),
                            name(program_.passes[id].block));
        }
      }
      go_through(stop, false);
    }
  }

 private:
  [[nodiscard]] const std::string& name(BlockId block) const { return program_.blocks[block].name; }
  [[nodiscard]] std::string_view kernel(PassId pass) const {
    return to_string(program_.passes[pass].kernel);
  }
  [[nodiscard]] const ValueClass& class_of(ValueId value) const {
    return program_.classes[program_.values[value].of];
  }

  void begin() {
    for (ValueId v = 0; v < alive_.size(); ++v) alive_[v] = class_of(v).from_host;
  }

  [[nodiscard]] bool is_chosen(const Stop& stop) const {
    return stop.form == HeadForm::any || stop.form == choice_.form;
  }
  static bool is_optional(Waits waits) {
    return waits == Waits::kept || waits == Waits::kept_attention;
  }
  [[nodiscard]] bool keeps(ValueId value) const {
    const bool attention = program_.values[value].waits == Waits::kept_attention;
    return choice_.keeps == (attention ? Keeps::attention : Keeps::all);
  }

  /// Begins the backward pass: only values that wait exist now.
  void turn() {
    backward_ = true;
    for (ValueId v = 0; v < alive_.size(); ++v) {
      const Waits waits = program_.values[v].waits;
      if (waits == Waits::placed) alive_[v] = written_[v];
      if (is_optional(waits)) alive_[v] = written_[v] && keeps(v);
      if (waits == Waits::again) alive_[v] = false;
    }
  }

  [[nodiscard]] bool is_lost(ValueId value) const {
    const StepValue& one = program_.values[value];
    if (!backward_ || one.recipe == kNone || remade_.contains(value)) return false;
    return one.waits == Waits::again || (one.waits == Waits::kept && !keeps(value));
  }

  void prepare(const Stop& stop) {
    for (const PassId id : stop.passes) {
      for (const Operand& operand : program_.passes[id].operands) {
        if (reads_value(operand) && is_lost(operand.number)) recompute(operand.number);
      }
    }
  }

  static bool reads_value(const Operand& operand) {
    return operand.kind == OperandKind::value && operand.access != OperandAccess::writes;
  }

  void recompute(ValueId value) {
    if (!remaking_.insert(value).second) {
      return breaches_.require(false, "the recipe of '{}' depends on itself",
                               program_.values[value].name);
    }
    const Recipe& recipe = program_.recipes[program_.values[value].recipe];
    std::set<ValueId> made;
    for (const Stop& stop : recipe.stops) {
      for (const PassId id : stop.passes) {
        for (const Operand& operand : program_.passes[id].operands) {
          if (operand.kind != OperandKind::value) continue;
          const bool own = made.contains(operand.number);
          if (reads_value(operand) && !own && is_lost(operand.number)) recompute(operand.number);
          if (operand.access == OperandAccess::writes) made.insert(operand.number);
        }
      }
    }
    for (const Stop& stop : recipe.stops) go_through(stop, true);
    remade_.insert(value);
    remaking_.erase(value);
  }

  void go_through(const Stop& stop, bool recipe) {
    for (const PassId id : stop.passes) {
      const Pass& pass = program_.passes[id];
      for (const Operand& operand : pass.operands) {
        if (operand.optional && !keeps(operand.number)) continue;
        if (operand.kind == OperandKind::gradient) add(id, operand.number);
        if (reads_value(operand)) {
          breaches_.require(alive_[operand.number], "{} of {} reads '{}', which does not exist{}",
                            kernel(id), name(pass.block), program_.values[operand.number].name,
                            recipe ? ", in a recipe" : "");
        }
      }
      for (const Operand& operand : pass.operands) {
        const bool bound = !operand.optional || keeps(operand.number);
        if (operand.kind == OperandKind::value && operand.access == OperandAccess::writes &&
            bound) {
          // A second pass that adds to a gradient must not begin it anew.
          const ValueClass& of = program_.classes[program_.values[operand.number].of];
          const bool scratch = of.buffers == BufferRule::scratch;
          breaches_.require(recipe || scratch || !written_[operand.number],
                            "{} of {} writes '{}' again", kernel(id), name(pass.block),
                            program_.values[operand.number].name);
          write(operand.number);
        }
      }
    }
  }

  void write(ValueId value) {
    // Buffers of a ring are used in turn.
    if (class_of(value).buffers == BufferRule::in_turn) {
      for (ValueId other = 0; other < alive_.size(); ++other) {
        if (program_.values[other].of == program_.values[value].of && !backward_) {
          alive_[other] = false;
        }
      }
    }
    alive_[value] = true;
    written_[value] = true;
  }

  void add(PassId id, SumId sum) {
    const BlockId block = program_.sums[sum].block;
    breaches_.require(!finished_.contains(block),
                      "{} adds to the gradient of {}, which is complete", kernel(id), name(block));
    added_.insert(sum);
  }

  void finish(const Stop& stop) {
    for (const BlockId block : stop.finishes) {
      breaches_.require(finished_.insert(block).second, "the gradient of {} is complete twice",
                        name(block));
      order_.push_back(block);
    }
  }

  /// Checks that gradients are complete from the last block down to the first differentiated one.
  void check_finished() {
    std::vector<BlockId> expected;
    for (auto b = static_cast<BlockId>(program_.blocks.size());
         b-- > program_.first_differentiated;)
      expected.push_back(b);
    breaches_.require(order_ == expected, "gradients are not completed in order from {} down to {}",
                      program_.blocks.back().name, name(program_.first_differentiated));
  }

  const StepProgram& program_;
  Choice choice_;
  BreachList& breaches_;
  std::vector<bool> alive_;
  std::vector<bool> written_;   ///< written in the forward pass
  std::set<ValueId> remade_;    ///< recomputed by their recipes
  std::set<ValueId> remaking_;  ///< being recomputed
  std::set<SumId> added_;
  std::set<BlockId> finished_;
  std::vector<BlockId> order_;
  bool backward_ = false;
};

/// Checks each pass, recipe and block in isolation.
class PartCheck {
 public:
  PartCheck(const StepProgram& program, BreachList& breaches)
      : program_(program), breaches_(breaches) {}

  void run() {
    for (const Pass& pass : program_.passes) check_pass(pass);
    for (const StepValue& value : program_.values) check_value(value);
    for (const StepBlock& block : program_.blocks) check_rows(block);
    for (const auto* stops : {&program_.training, &program_.evaluation}) {
      for (const Stop& stop : *stops) check_form(stop);
    }
  }

 private:
  void check_pass(const Pass& pass) {
    const std::string_view kernel = to_string(pass.kernel);
    const std::string& block = program_.blocks[pass.block].name;
    const std::optional<RowCount>& rows = program_.blocks[pass.block].rows;
    bool counts = false;
    for (const Operand& operand : pass.operands) {
      const bool costs = operand.absent != PassCost() || operand.spared != PassCost();
      breaches_.require(operand.optional || !costs,
                        "{} of {}: {} is not optional, but has a cost of absence", kernel, block,
                        to_string(operand.port));
      if (operand.kind == OperandKind::rows) {
        const StepBlock& table = program_.blocks[operand.number];
        const bool reads = operand.access == OperandAccess::reads;
        breaches_.require((reads ? table.selected : table.row_gradients) > 0,
                          "{} of {} {} rows of a block that is not a {}table", kernel, block,
                          reads ? "reads" : "writes the gradient of", reads ? "" : "trained ");
      }
      if (operand.kind == OperandKind::gradient && program_.sums[operand.number].by_token) {
        breaches_.require(
            std::ranges::find(pass.operands, Port::batch, &Operand::port) != pass.operands.end(),
            "{} of {} adds to the rows of tokens without a batch", kernel, block);
      }
      if (operand.port == Port::routing_counts) {
        counts = true;
        breaches_.require(rows && operand.number == (pass.reference > 0 ? rows->reference_routing
                                                                        : rows->routing),
                          "{} of {} reads the wrong row counts", kernel, block);
      }
      if (!operand.optional) continue;
      const bool kept = operand.kind == OperandKind::value &&
                        program_.values[operand.number].recipe == kNone &&
                        (program_.values[operand.number].waits == Waits::kept ||
                         program_.values[operand.number].waits == Waits::kept_attention);
      breaches_.require(kept, "{} of {}: {} is optional, but not kept without a recipe", kernel,
                        block, to_string(operand.port));
    }
    breaches_.require(!rows || counts, "{} of {} does not read its row counts", kernel, block);
  }

  void check_value(const StepValue& value) {
    const bool recipe = value.recipe != kNone;
    breaches_.require(value.waits != Waits::again || recipe, "'{}' is lost, but has no recipe",
                      value.name);
    breaches_.require(!recipe || value.waits == Waits::again || value.waits == Waits::kept,
                      "'{}' has a recipe, but is never lost", value.name);
    if (recipe) check_recipe(value);
  }

  /// Checks that a recipe writes its value, and reads only values that wait or that it computes.
  void check_recipe(const StepValue& value) {
    std::set<ValueId> made;
    for (const Stop& stop : program_.recipes[value.recipe].stops) {
      for (const PassId id : stop.passes) {
        for (const Operand& operand : program_.passes[id].operands) {
          breaches_.require(!operand.optional, "the recipe of '{}' has an optional operand",
                            value.name);
          breaches_.require(operand.kind != OperandKind::gradient,
                            "the recipe of '{}' adds to a gradient", value.name);
          if (operand.kind != OperandKind::value) continue;
          if (operand.access == OperandAccess::writes) {
            made.insert(operand.number);
            continue;
          }
          const StepValue& read = program_.values[operand.number];
          const bool waits = read.waits == Waits::placed || read.recipe != kNone ||
                             program_.classes[read.of].from_host;
          breaches_.require(waits || made.contains(operand.number),
                            "the recipe of '{}' reads '{}', which is not kept", value.name,
                            read.name);
        }
      }
    }
    const auto number = static_cast<ValueId>(&value - program_.values.data());
    breaches_.require(made.contains(number), "the recipe of '{}' does not write it", value.name);
  }

  void check_rows(const StepBlock& block) {
    breaches_.require(block.rows || !block.per_rank, "{} has an expert per rank, but no rows",
                      block.name);
    if (!block.rows) return;
    const bool routing = block.rows->routing < program_.values.size();
    breaches_.require(routing, "the rows of {} have no routing", block.name);
    if (!routing) return;
    const StepValue& counts = program_.values[block.rows->routing];
    breaches_.require(program_.classes[counts.of].counts, "the rows of {} are not counted by '{}'",
                      block.name, counts.name);
  }

  void check_form(const Stop& stop) {
    breaches_.require(stop.form == HeadForm::any || program_.one_pass.has_value(),
                      "a stop is for one form of a head that has only one");
  }

  const StepProgram& program_;
  BreachList& breaches_;
};

}  // namespace

std::vector<std::string> check(const StepProgram& program) {
  BreachList breaches;
  NumberCheck(program, breaches).run();
  if (!breaches.lines().empty()) return breaches.lines();
  PartCheck(program, breaches).run();
  std::vector<HeadForm> forms = {HeadForm::any};
  if (program.one_pass) forms = {HeadForm::one_pass, HeadForm::visits};
  for (const HeadForm form : forms) {
    for (const Walk::Keeps keeps :
         {Walk::Keeps::nothing, Walk::Keeps::attention, Walk::Keeps::all}) {
      Walk(program, {.form = form, .keeps = keeps}, breaches).train();
    }
  }
  Walk(program, {}, breaches).evaluate();
  return breaches.lines();
}

}  // namespace ballast::model
