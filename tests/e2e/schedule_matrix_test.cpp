#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/sanitizers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Order, time of the update, placement and the timing of every single operation do not change a
// single bit of the results: all combinations are compared with one serial run.

namespace ballast::engine::schedule_matrix_test {
namespace {

const std::string kModel = R"("family": "gpt2", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 2, "num_heads": 4)";
const std::string kNoClipping = "gradient_clipping=0";

std::uint64_t steps() {
  return test::kSanitized ? 8 : 12;
}

test::Outcome train(std::vector<std::string> overrides) {
  const test::TempDir directory;
  overrides.insert(overrides.begin(), kNoClipping);
  return test::train(test::tiny_config(kModel, true, directory.path(), overrides), steps(),
                     test::scattered_ids);
}

using Overrides = std::vector<std::string>;

struct Choice {
  std::string name;
  Overrides overrides;
};

std::vector<Choice> placements() {
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  const std::string one_buffer = "zero_optimization.offload_optimizer.buffer_count=1";
  std::vector<Choice> all = {
      {"all on device", {}},
      {"weights and optimizer on host", {weights + "cpu", optimizer + "cpu"}},
      {"weights and optimizer on NVMe", {weights + "nvme", optimizer + "nvme", one_buffer}},
      {"weights on device, optimizer on NVMe, activations on host",
       {optimizer + "nvme", "ballast.activations=host"}},
      {"mixed, activations too",
       {weights + "cpu", optimizer + "nvme", "zero_optimization.sub_group_size=10000",
        R"(ballast.placement=[{"blocks": 1, "weights": "nvme", "activations": "nvme",
                               "gradients": "nvme"},
                              {"blocks": 2, "weights": "device", "activations": "host"},
                              {"blocks": 3, "weights": "nvme", "optimizer": "device"}])"}},
      {"weights on NVMe, optimizer on device, activations on NVMe",
       {weights + "nvme", "ballast.activations=nvme"}},
  };
  // The maximum of threads, buffers and lanes in use at once.
  if (test::kSanitized) return {all[2], all[4]};
  return all;
}

TEST(ScheduleMatrix, EveryCombinationLearnsTheSameBits) {
  const test::Outcome expected = train({"ballast.serial=true"});
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  std::uint64_t seed = 0;
  for (const Choice& place : placements()) {
    for (const std::string order :
         {"layer_major", "micro_batch_major", "micro_batch_major_offload"}) {
      for (const std::string update : {"gated", "eager"}) {
        for (const bool delayed : {false, true}) {
          Overrides overrides = place.overrides;
          overrides.push_back("ballast.order=" + order);
          overrides.push_back("ballast.update=" + update);
          if (delayed) overrides.push_back(fmt::format("ballast.delay_seed={}", ++seed));
          test::expect_same(train(overrides), expected,
                            fmt::format("{}, {}, {}{}", place.name, order, update,
                                        delayed ? ", delayed at random" : ""));
        }
      }
    }
  }
}

TEST(ScheduleMatrix, EagerEqualsGatedWhenNothingIsClipped) {
  test::expect_same(train({"ballast.update=eager"}), train({"gradient_clipping=1e9"}), "clipping");
  // Checks that clipping would be visible if it were active.
  EXPECT_NE(train({"gradient_clipping=0.9"}).states, train({}).states);
}

}  // namespace
}  // namespace ballast::engine::schedule_matrix_test
