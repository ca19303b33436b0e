#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/step/random_workload.h"
#include "tests/unit/step/shape_of_workload.h"

namespace ballast::step::random_programs_test {
namespace {

/// Sizes that no model has.
Workload random_sizes(std::uint64_t seed) {
  Workload work = (seed % 5 == 4 ? random_problem_of_ranks(seed) : random_problem(seed)).workload;
  const std::uint32_t last = work.first_differentiated;
  if (seed % 7 == 3 && !work.cuts_layers() && work.is_layer(last)) work.pairs_bytes = 256;
  return work;
}

TEST(RandomPrograms, BreakNoRule) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const model::StepProgram program = model::write_program(shape_of(random_sizes(seed)));
    ASSERT_EQ(model::check(program), std::vector<std::string>()) << "seed " << seed << "\n"
                                                                 << model::to_text(program);
  }
}

}  // namespace
}  // namespace ballast::step::random_programs_test
