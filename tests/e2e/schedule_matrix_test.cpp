#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "tests/support/covering.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Order, time of the update, placement and the timing of every single operation do not change a
// single bit of the results: combinations in which each of them occurs with each other one are
// compared with one serial run.

namespace ballast::engine::schedule_matrix_test {
namespace {

using test::Overrides;

const std::string kModel = R"("family": "gpt2", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 2, "num_heads": 4)";
const std::string kNoClipping = "gradient_clipping=0";

std::uint64_t steps() {
  return test::kSanitized ? 8 : 12;
}

test::Outcome train(Overrides overrides) {
  const test::TempDir directory;
  overrides.insert(overrides.begin(), kNoClipping);
  return test::train(test::tiny_config(kModel, true, directory.path(), overrides), steps(),
                     test::scattered_ids);
}

test::Axis placements() {
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  const std::string one_buffer = "zero_optimization.offload_optimizer.buffer_count=1";
  const test::Axis all = {
      {},
      {weights + "cpu", optimizer + "cpu"},
      {weights + "nvme", optimizer + "nvme", one_buffer},
      {optimizer + "nvme", "ballast.activations=host"},
      {weights + "cpu", optimizer + "nvme", "zero_optimization.sub_group_size=10000",
       R"(ballast.placement=[{"blocks": 1, "weights": "nvme", "activations": "nvme",
                              "gradients": "nvme"},
                             {"blocks": 2, "weights": "device", "activations": "host"},
                             {"blocks": 3, "weights": "nvme", "optimizer": "device"}])"},
      {weights + "nvme", "ballast.activations=nvme"},
  };
  // The maximum of threads, buffers and lanes in use at once.
  if (test::kSanitized) return {all[2], all[4]};
  return all;
}

TEST(ScheduleMatrix, EveryPairOfChoicesLearnsTheSameBits) {
  const test::Outcome expected = train({"ballast.serial=true"});
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  const std::vector<test::Axis> axes = {placements(),
                                        {{"ballast.order=layer_major"},
                                         {"ballast.order=micro_batch_major"},
                                         {"ballast.order=micro_batch_major_offload"}},
                                        {{"ballast.update=gated"}, {"ballast.update=eager"}},
                                        {{}, {"ballast.delay_seed=1"}}};
  std::uint64_t seed = 0;
  for (const test::Row& row : test::rows_of_pairs(axes)) {
    Overrides overrides = test::overrides_of(axes, row);
    if (row.back() == 1) overrides.back() = fmt::format("ballast.delay_seed={}", ++seed);
    test::expect_same(train(overrides), expected, fmt::format("{}", fmt::join(overrides, " ")));
  }
}

TEST(ScheduleMatrix, EagerEqualsGatedWhenNothingIsClipped) {
  test::expect_same(train({"ballast.update=eager"}), train({"gradient_clipping=1e9"}), "clipping");
  // Checks that clipping would be visible if it were active.
  EXPECT_NE(train({"gradient_clipping=0.9"}).states, train({}).states);
}

}  // namespace
}  // namespace ballast::engine::schedule_matrix_test
