// Speculative updates give the bits of gated ones, whether steps are clipped, skipped or neither.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/random.h"
#include "ballast/engine/engine.h"
#include "ballast/planner/planner.h"

#include "tests/support/function_weights.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::speculation_test {
namespace {

using Overrides = std::vector<std::string>;

const std::string kModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 3, "num_heads": 2)";
const std::string kOptimizer = "zero_optimization.offload_optimizer.device=";
const std::string kWeights = "zero_optimization.offload_param.device=";
constexpr std::uint64_t kSteps = 14;
/// Token whose row of the embedding is not finite, which makes every step with it not finite.
constexpr std::int32_t kPoison = 130;

/// Steps that are not finite: two in a row, one after an evaluation, the last one.
bool poisoned(std::uint64_t step) {
  return step == 4 || step == 5 || step == 11 || step == kSteps;
}

struct Results {
  std::vector<std::uint64_t> numbers;  ///< bit patterns of losses and norms
  std::vector<double> norms;
  std::uint64_t states = 0;
  std::uint64_t updates = 0;
  std::uint64_t skipped = 0;
  std::uint64_t rolled_back = 0;
};

/// Small values, and infinity in the row of kPoison.
void first_values(const model::TensorSpec& tensor, Elems first, std::span<float> out) {
  std::uint64_t seed = 0;
  for (const char c : tensor.name) seed = 31 * seed + static_cast<unsigned char>(c);
  const bool poisoned = tensor.name.find("embed_tokens") != std::string::npos;
  for (Elems i = first; i < first + out.size(); ++i) {
    float& value = out[i - first];
    value = (static_cast<float>(random_u64(seed, i) % 2001) - 1000.0F) * 5e-5F;
    if (tensor.shape.size() == 1) value += 1.0F;
    if (poisoned && i / tensor.shape.back() == kPoison) {
      value = std::numeric_limits<float>::infinity();
    }
  }
}

/// Trains steps of different sizes and learning rates, with evaluations and reads of the states.
Results train(const Overrides& overrides, bool with_poison = false, bool bf16 = true) {
  const test::TempDir directory;
  Engine engine =
      planner::make_engine(test::tiny_config(kModel, bf16, directory.path(), overrides));
  test::start_from(engine, {first_values});
  Results results;
  const auto note = [&](double number) {
    results.numbers.push_back(std::bit_cast<std::uint64_t>(number));
  };
  const std::size_t whole = engine.blueprint().tokens_per_step();
  const std::size_t evaluated =
      engine.evaluation_micro_batches() * engine.blueprint().shape.tokens();
  const auto ids = [&](std::size_t tokens, std::uint64_t number) {
    test::Batch batch = test::scattered_ids(tokens, number);
    std::replace(batch.tokens.begin(), batch.tokens.end(), kPoison, std::int32_t{0});
    return batch;
  };
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    test::Batch batch = ids(step == 7 || step == 8 ? whole / 3 : whole, step);
    if (with_poison && poisoned(step)) batch.tokens[3] = kPoison;
    const StepResult result =
        engine.train_step({batch.tokens, batch.targets}, 0.003 / static_cast<double>(1 + step % 3));
    EXPECT_EQ(result.skipped, with_poison && poisoned(step)) << "step " << step;
    note(result.loss);
    note(result.grad_norm);
    results.norms.push_back(result.grad_norm);
    results.skipped += result.skipped ? 1 : 0;
    results.rolled_back += result.rolled_back ? 1 : 0;
    if (step % 5 == 0) {
      const test::Batch held_out = ids(evaluated, 500);
      note(engine.evaluate({held_out.tokens, held_out.targets}).loss);
    }
    if (step == 9) results.numbers.push_back(engine.snapshot().hash());
  }
  results.states = engine.snapshot().hash();
  results.updates = engine.updates();
  return results;
}

void expect_same(const Results& results, const Results& expected, const std::string& name) {
  EXPECT_EQ(results.numbers, expected.numbers) << name;
  EXPECT_EQ(results.states, expected.states) << name;
  EXPECT_EQ(results.updates, expected.updates) << name;
  EXPECT_EQ(results.skipped, expected.skipped) << name;
}

struct Choice {
  std::string name;
  Overrides overrides;
};

enum class Places { all, some };

/// Every tier of weights below which states may be, in both orders, and some mixtures; or some of
/// these.
std::vector<Choice> placements(Places places) {
  std::vector<Choice> all;
  std::uint64_t seed = 0;
  for (const std::string weights : {"none", "cpu", "nvme"}) {
    for (const std::string states : {"cpu", "nvme"}) {
      for (const std::string order : {"layer_major", "micro_batch_major"}) {
        all.push_back({fmt::format("weights {}, states {}, {}", weights, states, order),
                       {kWeights + weights, kOptimizer + states, "ballast.order=" + order,
                        fmt::format("ballast.delay_seed={}", ++seed)}});
      }
    }
  }
  all.push_back({"one staging buffer",
                 {kWeights + "nvme", kOptimizer + "nvme",
                  "zero_optimization.offload_optimizer.buffer_count=1",
                  "zero_optimization.offload_param.buffer_count=1",
                  "zero_optimization.sub_group_size=7000", "ballast.serial=true"}});
  all.push_back({"mixed",
                 {kWeights + "cpu", kOptimizer + "nvme", "zero_optimization.sub_group_size=9000",
                  R"(ballast.placement=[{"blocks": 1, "weights": "nvme", "optimizer": "cpu"},
                                        {"blocks": 2, "weights": "device"},
                                        {"blocks": 3, "optimizer": "device"}])"}});
  if (places == Places::some || test::kSanitized) all.erase(all.begin() + 1, all.end() - 3);
  return all;
}

/// Compares placements, with two and with all blocks speculating, with gated updates.
void compare(const Overrides& common, bool with_poison, bool bf16, std::uint64_t rolled_back,
             Places places) {
  const Results expected = train(common, with_poison, bf16);
  EXPECT_EQ(expected.rolled_back, 0U);
  for (const Choice& place : placements(places)) {
    for (const char* count : {"2", "100"}) {
      Overrides overrides = common;
      overrides.insert(overrides.end(), place.overrides.begin(), place.overrides.end());
      overrides.push_back(std::string("ballast.speculative_updates=") + count);
      const Results results = train(overrides, with_poison, bf16);
      expect_same(results, expected, fmt::format("{}, {} blocks", place.name, count));
      EXPECT_EQ(results.rolled_back, rolled_back) << place.name;
    }
  }
}

/// A norm that half of the steps exceed, and the number of these steps.
std::pair<std::string, std::uint64_t> clipping_of_some(const Overrides& common, bool with_poison,
                                                       bool bf16) {
  Overrides overrides = common;
  overrides.emplace_back("gradient_clipping=1e-3");  // clipping every step, like most below
  std::vector<double> norms = train(overrides, with_poison, bf16).norms;
  std::erase_if(norms, [](double norm) { return !std::isfinite(norm); });
  std::sort(norms.begin(), norms.end());
  const double middle = norms[norms.size() / 2];
  overrides.back() = fmt::format("gradient_clipping={}", middle);
  const Results results = train(overrides, with_poison, bf16);
  const auto clipped = std::count_if(results.norms.begin(), results.norms.end(), [&](double norm) {
    return !std::isfinite(norm) || norm + 1e-6 > middle;
  });
  EXPECT_GT(clipped, static_cast<std::ptrdiff_t>(results.skipped));
  EXPECT_LT(clipped, static_cast<std::ptrdiff_t>(kSteps));
  return {overrides.back(), static_cast<std::uint64_t>(clipped)};
}

TEST(Speculation, LearnsTheSameBitsWhenNothingIsClipped) {
  compare({"gradient_clipping=1e9"}, false, true, 0, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWhenEveryStepIsClipped) {
  compare({"gradient_clipping=1e-3"}, false, true, kSteps, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWhenSomeStepsAreClippedAndSomeSkipped) {
  const auto [clipping, clipped] = clipping_of_some({}, true, true);
  compare({clipping}, true, true, clipped, Places::all);
}

TEST(Speculation, LearnsTheSameBitsInFp32) {
  const auto [clipping, clipped] = clipping_of_some({}, true, false);
  compare({clipping}, true, false, clipped, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWithMomentsInEightBits) {
  const std::string states = "ballast.optimizer_states=8bit";
  const auto [clipping, clipped] = clipping_of_some({states}, true, true);
  compare({states, clipping}, true, true, clipped, Places::some);
}

TEST(Speculation, ClippingAndSkippingAreVisibleInTheStates) {
  const auto states = [](const std::string& clipping, bool with_poison) {
    return train({"gradient_clipping=" + clipping}, with_poison).states;
  };
  EXPECT_NE(states("1e9", false), states("1e-3", false));
  EXPECT_NE(states("1e9", false), states("1e9", true));
}

}  // namespace
}  // namespace ballast::engine::speculation_test
