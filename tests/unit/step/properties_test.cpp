// Properties of every schedule, tested on thousands of random ones: sizes, placements, options,
// ranks, and sequences of runs as in a training loop.

#include <set>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/step/plan_types.h"
#include "tests/unit/step/fake_run.h"
#include "tests/unit/step/interpreter.h"
#include "tests/unit/step/random_workload.h"

namespace ballast::step::properties_test {
namespace {

constexpr std::uint64_t kCases = 2000;
constexpr std::size_t kRuns = 6;

struct Case {
  Problem problem;
  Workload work;
  Schedule schedule;
  RunSequence sequence;
};

Case random_case(std::uint64_t seed) {
  Case made;
  // Half of the problems of ranks may have tiles and experts.
  made.problem = seed % 4 == 3   ? random_problem_of_ranks(seed / 2)
                 : seed % 8 == 5 ? random_evaluation(seed)
                                 : random_problem(seed);
  add_codes(made.problem.workload, seed);
  made.work = with_program(made.problem.workload);
  made.schedule = build(made.work, made.problem.placement, made.problem.options);
  made.sequence = random_runs(made.problem, made.schedule, seed, kRuns);
  return made;
}

using Lines = std::vector<std::string>;

/// The first few of `lines`.
Lines first_of(Lines lines) {
  if (lines.size() > 3) lines.resize(3);
  return lines;
}

TEST(EverySchedule, GivesEachOperationJustWhatItNeedsWhateverTheOperationsTake) {
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    const Lines faults = find_faults(c.work, c.problem.placement, c.problem.options, c.schedule,
                                     c.sequence.runs, seed);
    ASSERT_EQ(first_of(faults), Lines{}) << "seed " << seed;
    const auto spans = fake_spans(c.sequence.runs, seed);
    ASSERT_EQ(first_of(find_conflicts(c.schedule, spans)), Lines{}) << "seed " << seed;
  }
}

TEST(EverySchedule, ForEvaluationHasOnlyWhatItsEvaluationUses) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const Problem problem = random_evaluation(seed);
    const Schedule schedule =
        build(with_program(problem.workload), problem.placement, problem.options);
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
      ASSERT_TRUE(used.contains(id) || fills) << "seed " << seed << ": " << buffer.name;
    }
  }
}

TEST(EverySchedule, ForEvaluationRefusesToPlaceMoreThanWeights) {
  Problem problem = random_evaluation(1);
  problem.placement.blocks.back().optimizer = Tier::host;
  EXPECT_THROW(build(with_program(problem.workload), problem.placement, problem.options), Error);
  problem.placement.blocks.back().optimizer = Tier::device;
  EXPECT_THROW(build_partial_step(with_program(problem.workload), problem.placement,
                                  problem.options, 1, false),
               Error);
}

TEST(EverySchedule, OrdersEveryTwoUsesOfABufferAcrossRuns) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Case c = random_case(seed);
    ASSERT_EQ(first_of(plan::find_hazards(c.schedule, c.sequence.runs)), Lines{})
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::step::properties_test
