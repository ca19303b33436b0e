// Properties of every schedule, tested on thousands of random ones: sizes, placements, options,
// ranks, and sequences of runs as in a training loop.

#include <set>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/step/labels.h"

#include "tests/support/hazards.h"
#include "tests/support/random_problem.h"
#include "tests/support/step_programs.h"
#include "tests/unit/step/fake_run.h"
#include "tests/unit/step/interpreter.h"

namespace ballast::step::properties_test {
namespace {

constexpr std::size_t kRuns = 6;

struct Case {
  explicit Case(std::uint64_t seed)
      : placed(any_problem(seed, true)),
        schedule(build(placed.problem, placed.placement, placed.options)),
        sequence(random_runs(placed, schedule, seed, kRuns)) {}

  BuildArguments placed;
  Schedule schedule;
  RunSequence sequence;
};

using Lines = std::vector<std::string>;

/// The first few of `lines`.
Lines first_of(Lines lines) {
  if (lines.size() > 3) lines.resize(3);
  return lines;
}

TEST(EverySchedule, GivesEachOperationJustWhatItNeedsWhateverTheOperationsTake) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Case c(seed);
    const auto& [problem, placement, options] = c.placed;
    ASSERT_EQ(first_of(model::check(problem.program())), Lines{}) << "seed " << seed;
    const Lines faults =
        find_faults(problem, placement, options, c.schedule, c.sequence.runs, seed);
    ASSERT_EQ(first_of(faults), Lines{}) << "seed " << seed;
    const auto spans = fake_spans(c.sequence.runs, seed);
    ASSERT_EQ(first_of(find_conflicts(c.schedule, spans)), Lines{}) << "seed " << seed;
  }
}

TEST(EverySchedule, ForEvaluationHasOnlyWhatItsEvaluationUses) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const auto [problem, placement, options] =
        random_problem(seed, {.ranks = seed % 2 == 0, .devices = true, .evaluation = true});
    const Schedule schedule = build(problem, placement, options);
    std::set<BufferId> used;
    for (const Operation& op : schedule.evaluation.operations) {
      for (const Use& use : op.uses) used.insert(use.buffer);
    }
    for (const Plan* plan :
         {&schedule.first, &schedule.steady, &schedule.flush, &schedule.rollback}) {
      ASSERT_TRUE(plan->operations.empty()) << "seed " << seed << ": " << plan->name;
    }
    for (BufferId id = 0; id < schedule.buffers.size(); ++id) {
      const Buffer& buffer = schedule.buffers[id];
      // The fill of device memory passes through one buffer.
      const bool fills = buffer.name == "staging for data on the device";
      // A reference model of one layer does not use all buffers of its ring.
      const bool ring = buffer.name.starts_with("activations of the reference");
      ASSERT_TRUE(used.contains(id) || fills || ring) << "seed " << seed << ": " << buffer.name;
    }
  }
}

TEST(EverySchedule, ForEvaluationRefusesToPlaceMoreThanWeights) {
  auto [problem, placement, options] = random_problem(1, {.evaluation = true});
  placement.blocks.back().optimizer = Tier::host;
  EXPECT_THROW(build(problem, placement, options), Error);
  placement.blocks.back().optimizer = Tier::device;
  EXPECT_THROW(build_partial_step(problem, placement, options, 1, false), Error);
}

TEST(EverySchedule, OrdersAllUsesOfABufferAcrossRuns) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const Case c(seed);
    ASSERT_EQ(first_of(plan::find_hazards(c.schedule, c.sequence.runs)), Lines{})
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::step::properties_test
