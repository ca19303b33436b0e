#include <gtest/gtest.h>

#include "ballast/step/program_index.h"

namespace ballast::step {
namespace {

using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::StepProgram;
using model::Stop;
using model::ValueId;
using model::Waits;

/// A small program, pass by pass. All values are of one class.
class Sketch {
 public:
  Sketch() { program_.classes.push_back({.name = "rows", .bytes = 64}); }

  ValueId value(Waits waits = Waits::no) {
    program_.values.push_back({.waits = waits});
    return static_cast<ValueId>(program_.values.size() - 1);
  }
  /// A stop with one pass that reads `reads` and begins the lives of `writes`.
  Stop stop(const std::vector<ValueId>& reads, const std::vector<ValueId>& writes,
            bool backward = false) {
    model::Pass pass;
    const auto add = [&](const std::vector<ValueId>& values, OperandAccess access) {
      for (const ValueId v : values) {
        pass.operands.push_back({.kind = OperandKind::value, .number = v, .access = access});
      }
    };
    add(reads, OperandAccess::reads);
    add(writes, OperandAccess::writes);
    program_.passes.push_back(std::move(pass));
    return {.passes = {static_cast<model::PassId>(program_.passes.size() - 1)},
            .backward = backward};
  }
  void recipe(ValueId value, std::vector<Stop> stops) {
    program_.values[value].recipe = static_cast<model::RecipeId>(program_.recipes.size());
    program_.recipes.push_back({std::move(stops)});
  }
  StepProgram& program() { return program_; }

 private:
  StepProgram program_;
};

/// The first passes of the stops that run before `stop`.
std::vector<model::PassId> runs_before(Recomputation& recomputation, const Stop& stop) {
  std::vector<model::PassId> passes;
  recomputation.before(stop, [&](const Stop& again) { passes.push_back(again.passes.front()); });
  return passes;
}

/// The two halves of a layer in tiles. `rows` are lost until the backward pass, `middle` if the
/// block keeps nothing.
struct TwoHalves {
  Sketch sketch;
  ValueId input = sketch.value();
  ValueId first_rows = sketch.value(Waits::again);
  ValueId middle = sketch.value(Waits::kept);
  ValueId second_rows = sketch.value(Waits::again);
  Stop first_norm = sketch.stop({input}, {first_rows});
  Stop first_tile = sketch.stop({first_rows}, {middle});
  Stop second_norm = sketch.stop({middle}, {second_rows});
  Stop second_backward = sketch.stop({second_rows}, {}, true);
  Stop first_backward = sketch.stop({first_rows}, {}, true);

  TwoHalves() {
    sketch.recipe(first_rows, {first_norm});
    sketch.recipe(middle, {first_norm, first_tile});
    sketch.recipe(second_rows, {second_norm});
  }
};

TEST(Recomputation, RunsTheRecipesOfItsInputsFirst) {
  TwoHalves halves;
  Recomputation nothing_kept(halves.sketch.program(), {});
  EXPECT_EQ(runs_before(nothing_kept, halves.second_backward),
            (std::vector<model::PassId>{halves.first_norm.passes[0], halves.first_tile.passes[0],
                                        halves.second_norm.passes[0]}));
  // The second half may have overwritten the rows of the first.
  EXPECT_EQ(runs_before(nothing_kept, halves.first_backward), halves.first_norm.passes);
  EXPECT_TRUE(runs_before(nothing_kept, halves.first_backward).empty());
  nothing_kept.restart();
  EXPECT_EQ(runs_before(nothing_kept, halves.first_backward), halves.first_norm.passes);
}

TEST(Recomputation, LeavesOutWhatABlockKeeps) {
  TwoHalves halves;
  Recomputation kept(halves.sketch.program(), {true});
  EXPECT_EQ(runs_before(kept, halves.second_backward), halves.second_norm.passes);
}

TEST(Recomputation, HappensOnlyInTheBackwardPass) {
  TwoHalves halves;
  Recomputation nothing_kept(halves.sketch.program(), {});
  EXPECT_TRUE(runs_before(nothing_kept, halves.second_norm).empty());
}

TEST(Colours, DifferForValuesThatLiveAtTheSameTime) {
  Sketch sketch;
  const ValueId early = sketch.value();
  const ValueId late = sketch.value();
  const ValueId last = sketch.value();
  StepProgram& program = sketch.program();
  program.training = {sketch.stop({}, {early}), sketch.stop({early}, {late}),
                      sketch.stop({late}, {}), sketch.stop({}, {last})};
  const Colours colours = colour(program, model::HeadForm::any, true);
  EXPECT_NE(colours.of_value[early], colours.of_value[late]);
  EXPECT_EQ(colours.of_value[early], colours.of_value[last]);
  EXPECT_EQ(colours.training, std::vector<std::uint32_t>{2});
  EXPECT_EQ(colours.evaluation, std::vector<std::uint32_t>{0});
}

TEST(Colours, CountTheLivesThatARecipeBegins) {
  TwoHalves halves;
  Sketch& sketch = halves.sketch;
  const ValueId across = sketch.value();
  StepProgram& program = sketch.program();
  program.training = {halves.first_norm,      halves.first_tile,
                      halves.second_norm,     sketch.stop({}, {across}),
                      halves.second_backward, sketch.stop({across}, {}, true)};
  const Colours colours = colour(program, model::HeadForm::any, true);
  // The recipes write them again while the other value lives.
  EXPECT_NE(colours.of_value[across], colours.of_value[halves.first_rows]);
  EXPECT_NE(colours.of_value[across], colours.of_value[halves.middle]);
  EXPECT_NE(colours.of_value[across], colours.of_value[halves.second_rows]);
}

TEST(Colours, OfSumsReachFromTheFirstAdditionToTheEndOfTheirBlock) {
  Sketch sketch;
  StepProgram& program = sketch.program();
  program.blocks.resize(2);
  program.sums = {{.block = 0, .bytes = 8}, {.block = 1, .bytes = 8}, {.block = 0, .bytes = 8}};
  program.sums[2].clears = false;
  const auto add_to = [&](std::vector<model::SumId> sums, std::vector<model::BlockId> finishes) {
    Stop stop = sketch.stop({}, {}, true);
    for (const model::SumId sum : sums) {
      program.passes.back().operands.push_back(
          {.kind = OperandKind::gradient, .number = sum, .access = OperandAccess::updates});
    }
    stop.finishes = std::move(finishes);
    program.training.push_back(std::move(stop));
  };
  add_to({1, 2}, {1});  // the head also adds to the second sum of block 0
  add_to({0}, {0});
  const Colours colours = colour(program, model::HeadForm::any, true);
  EXPECT_EQ(colours.of_sum, (std::vector<std::uint32_t>{0, 0, 1}));
  EXPECT_EQ(colours.sums, 2U);
}

}  // namespace
}  // namespace ballast::step
