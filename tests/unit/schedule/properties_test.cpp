// Properties of every schedule, tested on thousands of random ones: sizes, placements, options,
// ranks, and sequences of runs as in a training loop.

#include <gtest/gtest.h>

#include "tests/unit/schedule/fake_run.h"
#include "tests/unit/schedule/interpreter.h"
#include "tests/unit/schedule/random_workload.h"

namespace ballast::schedule {
namespace {

constexpr std::uint64_t kCases = 2000;
constexpr std::size_t kRuns = 6;

struct Case {
  Problem problem;
  Schedule schedule;
  RunSequence sequence;
};

Case random_case(std::uint64_t seed) {
  Case made;
  made.problem = seed % 4 == 3 ? random_problem_of_ranks(seed) : random_problem(seed);
  made.schedule = build(made.problem.workload, made.problem.placement, made.problem.options);
  made.sequence = random_runs(made.problem, made.schedule, seed, kRuns);
  return made;
}

using Lines = std::vector<std::string>;

/// The first few of `lines`.
Lines first_of(Lines lines) {
  if (lines.size() > 3) lines.resize(3);
  return lines;
}

TEST(EverySchedule, GivesEachOperationJustWhatItNeeds) {
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    Interpreter interpreter(c.problem, c.schedule);
    for (const Plan* plan : c.sequence.runs) interpreter.run(*plan);
    interpreter.finish();
    ASSERT_EQ(first_of(interpreter.complaints()), Lines{}) << "seed " << seed;
  }
}

TEST(EverySchedule, KeepsUsesOfABufferApartWhateverTheOperationsTake) {
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    const auto spans = fake_spans(c.sequence.runs, seed);
    ASSERT_EQ(first_of(find_conflicts(c.schedule, spans)), Lines{}) << "seed " << seed;
  }
}

TEST(EverySchedule, GivesTheSerialResultWhateverTheOperationsTake) {
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    ASSERT_EQ(result_of(c.schedule, fake_spans(c.sequence.runs, seed)),
              serial_result(c.schedule, c.sequence.runs))
        << "seed " << seed;
  }
}

TEST(EverySchedule, ReturnsEveryLeaseAndStaysWithinItsLedger) {
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = random_case(seed);
    const auto spans = fake_spans(c.sequence.runs, seed);
    ASSERT_EQ(first_of(find_lease_breaches(c.schedule, spans)), Lines{}) << "seed " << seed;
  }
}

TEST(EverySchedule, OrdersEveryTwoUsesOfABufferAcrossRuns) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Case c = random_case(seed);
    ASSERT_EQ(first_of(find_hazards(c.schedule, c.sequence.runs)), Lines{}) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::schedule
