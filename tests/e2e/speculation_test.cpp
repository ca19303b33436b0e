// Speculative updates give the bits of gated ones, whether steps are clipped, skipped or neither,
// and whether or not speculation pauses.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/random.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/function_weights.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/thread_channels.h"
#include "tests/support/thread_ranks.h"
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

/// Returns whether a step is not finite.
using Poison = bool (*)(std::uint64_t step);
bool never(std::uint64_t) {
  return false;
}
/// Two in a row, one after an evaluation, the last one.
bool sometimes(std::uint64_t step) {
  return step == 4 || step == 5 || step == 11 || step == kSteps;
}
bool at_first(std::uint64_t step) {
  return step <= 4;
}

struct Results {
  std::vector<std::uint64_t> numbers;  ///< bit patterns of losses and norms
  std::vector<double> norms;
  std::uint64_t states = 0;
  std::uint64_t updates = 0;
  std::uint64_t skipped = 0;
  std::uint64_t rolled_back = 0;
  std::vector<std::uint64_t> paused;  ///< steps in which speculation paused
};

enum class Pauses { never, when_it_should };

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

/// `pauses`: never if every step that can speculate shall.
std::unique_ptr<Engine> make_engine(const config::Config& config, Pauses pauses,
                                    comm::Ranks* ranks = nullptr) {
  const comm::Launch launch = ranks == nullptr ? comm::Launch{} : ranks->launch();
  EngineOptions options = setup::engine_options(config, launch);
  options.pauses_speculation = pauses == Pauses::when_it_should;
  return std::make_unique<Engine>(setup::draw_blueprint(config, ranks), options, nullptr, ranks);
}

/// Moves the states of `engine` to a new engine, as a checkpoint and a resume do.
std::unique_ptr<Engine> resumed(Engine& engine, const config::Config& config) {
  std::map<std::pair<std::size_t, StateKind>, std::vector<std::byte>> saved;
  engine.snapshot().save([&](const StateRange& range, ConstHostBytes bytes) {
    auto& array = saved[{range.block, range.kind}];
    array.insert(array.end(), bytes.begin(), bytes.end());
  });
  auto next = make_engine(config, Pauses::when_it_should);
  next->resume(
      [&](const StateRange& range, HostBytes bytes) {
        const auto& array = saved.at({range.block, range.kind});
        std::copy_n(array.begin() + static_cast<std::ptrdiff_t>(range.first * range.width),
                    bytes.size(), bytes.begin());
      },
      engine.updates());
  return next;
}

/// Trains steps of different sizes and learning rates, with evaluations and reads of the states.
/// `resumes_after`: step after which a new engine continues; 0: none.
Results train(const Overrides& overrides, Poison poisoned = never, bool bf16 = true,
              Pauses pauses = Pauses::never, comm::Ranks* ranks = nullptr,
              std::uint64_t resumes_after = 0) {
  const test::TempDir directory;
  const test::TempDir next_directory;
  const auto config_in = [&](const test::TempDir& place) {
    return test::tiny_config(kModel, bf16, place.path(), overrides);
  };
  std::unique_ptr<Engine> engine = make_engine(config_in(directory), pauses, ranks);
  test::start_from(*engine, {first_values});
  Results results;
  const auto note = [&](double number) {
    results.numbers.push_back(std::bit_cast<std::uint64_t>(number));
  };
  const Blueprint blueprint = engine->blueprint();
  const std::size_t whole = blueprint.tokens_per_step();
  const std::size_t evaluated = engine->evaluation_micro_batches() * blueprint.shape.tokens();
  const auto ids = [&](std::size_t tokens, std::uint64_t number) {
    test::Batch batch = test::scattered_ids(tokens, number);
    std::replace(batch.tokens.begin(), batch.tokens.end(), kPoison, std::int32_t{0});
    return batch;
  };
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    test::Batch batch = ids(step == 7 || step == 8 ? whole / 3 : whole, step);
    if (poisoned(step)) batch.tokens[3] = kPoison;
    const StepResult result = engine->train_step({batch.tokens, batch.targets},
                                                 0.003 / static_cast<double>(1 + step % 3));
    EXPECT_EQ(result.skipped, poisoned(step)) << "step " << step;
    note(result.loss);
    note(result.grad_norm);
    results.norms.push_back(result.grad_norm);
    results.skipped += result.skipped ? 1 : 0;
    results.rolled_back += result.rolled_back ? 1 : 0;
    if (result.paused) results.paused.push_back(step);
    if (step % 5 == 0) {
      const test::Batch held_out = ids(evaluated, 500);
      note(engine->evaluate({held_out.tokens, held_out.targets}).loss);
    }
    if (step == 9) results.numbers.push_back(engine->snapshot().hash());
    if (step == resumes_after) engine = resumed(*engine, config_in(next_directory));
  }
  results.states = engine->snapshot().hash();
  results.updates = engine->updates();
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

/// Compares placements, with two and with all blocks speculating in every step, with gated updates.
void compare(const Overrides& common, Poison poisoned, bool bf16, std::uint64_t rolled_back,
             Places places) {
  const Results expected = train(common, poisoned, bf16);
  EXPECT_EQ(expected.rolled_back, 0U);
  for (const Choice& place : placements(places)) {
    for (const char* count : {"2", "100"}) {
      Overrides overrides = common;
      overrides.insert(overrides.end(), place.overrides.begin(), place.overrides.end());
      overrides.push_back(std::string("ballast.speculative_updates=") + count);
      const Results results = train(overrides, poisoned, bf16);
      expect_same(results, expected, fmt::format("{}, {} blocks", place.name, count));
      EXPECT_EQ(results.rolled_back, rolled_back) << place.name;
    }
  }
}

/// A norm that half of the steps exceed, and the number of these steps.
std::pair<std::string, std::uint64_t> clipping_of_some(const Overrides& common, Poison poisoned,
                                                       bool bf16) {
  Overrides overrides = common;
  overrides.emplace_back("gradient_clipping=1e-3");  // clipping every step, like most below
  std::vector<double> norms = train(overrides, poisoned, bf16).norms;
  std::erase_if(norms, [](double norm) { return !std::isfinite(norm); });
  std::sort(norms.begin(), norms.end());
  const double middle = norms[norms.size() / 2];
  overrides.back() = fmt::format("gradient_clipping={}", middle);
  const Results results = train(overrides, poisoned, bf16);
  const auto clipped = std::count_if(results.norms.begin(), results.norms.end(), [&](double norm) {
    return !std::isfinite(norm) || norm + 1e-6 > middle;
  });
  EXPECT_GT(clipped, static_cast<std::ptrdiff_t>(results.skipped));
  EXPECT_LT(clipped, static_cast<std::ptrdiff_t>(kSteps));
  return {overrides.back(), static_cast<std::uint64_t>(clipped)};
}

TEST(Speculation, LearnsTheSameBitsWhenNothingIsClipped) {
  compare({"gradient_clipping=1e9"}, never, true, 0, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWhenEveryStepIsClipped) {
  compare({"gradient_clipping=1e-3"}, never, true, kSteps, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWhenSomeStepsAreClippedAndSomeSkipped) {
  const auto [clipping, clipped] = clipping_of_some({}, sometimes, true);
  compare({clipping}, sometimes, true, clipped, Places::all);
}

TEST(Speculation, LearnsTheSameBitsInFp32) {
  const auto [clipping, clipped] = clipping_of_some({}, sometimes, false);
  compare({clipping}, sometimes, false, clipped, Places::some);
}

TEST(Speculation, LearnsTheSameBitsWithMomentsInEightBits) {
  const std::string states = "ballast.optimizer_states=8bit";
  const auto [clipping, clipped] = clipping_of_some({states}, sometimes, true);
  compare({states, clipping}, sometimes, true, clipped, Places::some);
}

TEST(Speculation, ClippingAndSkippingAreVisibleInTheStates) {
  const auto states = [](const std::string& clipping, Poison poisoned) {
    return train({"gradient_clipping=" + clipping}, poisoned).states;
  };
  EXPECT_NE(states("1e9", never), states("1e-3", never));
  EXPECT_NE(states("1e9", never), states("1e9", sometimes));
}

/// Steps `first` to `last`.
std::vector<std::uint64_t> steps(std::uint64_t first, std::uint64_t last) {
  std::vector<std::uint64_t> all(last + 1 - first);
  std::iota(all.begin(), all.end(), first);
  return all;
}

/// Compares placements in which speculation pauses with gated updates.
void compare_pausing(const Overrides& common, Poison poisoned, std::uint64_t rolled_back,
                     const std::vector<std::uint64_t>& paused, Places places) {
  const Results expected = train(common, poisoned);
  EXPECT_TRUE(expected.paused.empty());
  for (const Choice& place : placements(places)) {
    for (const char* count : {"2", "100"}) {
      Overrides overrides = common;
      overrides.insert(overrides.end(), place.overrides.begin(), place.overrides.end());
      overrides.push_back(std::string("ballast.speculative_updates=") + count);
      const Results results = train(overrides, poisoned, true, Pauses::when_it_should);
      expect_same(results, expected, fmt::format("{}, {} blocks", place.name, count));
      EXPECT_EQ(results.rolled_back, rolled_back) << place.name;
      EXPECT_EQ(results.paused, paused) << place.name;
    }
  }
}

TEST(PausedSpeculation, LearnsTheSameBitsWhenEveryStepIsClipped) {
  compare_pausing({"gradient_clipping=1e-3"}, never, 4, steps(5, kSteps), Places::all);
}

/// Step 11 is the first with at most one skipped step among the last eight.
TEST(PausedSpeculation, ResumesWhenStepsAreNoLongerSkipped) {
  compare_pausing({"gradient_clipping=1e9"}, at_first, 4, steps(5, 11), Places::some);
}

TEST(PausedSpeculation, LearnsTheSameBitsWhenPausedStepsAreSkipped) {
  compare_pausing({"gradient_clipping=1e-3"}, sometimes, 4, steps(5, kSteps), Places::some);
}

TEST(PausedSpeculation, BeginsAgainAfterAResume) {
  const Overrides common = {"gradient_clipping=1e-3", kWeights + "cpu", kOptimizer + "nvme"};
  Overrides speculating = common;
  speculating.emplace_back("ballast.speculative_updates=2");
  const Results results =
      train(speculating, never, true, Pauses::when_it_should, nullptr, 6);  // while it pauses
  expect_same(results, train(common), "resumed");
  std::vector<std::uint64_t> paused = steps(11, kSteps);
  paused.insert(paused.begin(), {5, 6});
  EXPECT_EQ(results.paused, paused);
}

TEST(PausedSpeculation, IsThatOfAllRanks) {
  constexpr std::uint32_t kWorld = 2;
  const auto train_ranks = [](const std::string& count, Pauses pauses) {
    std::vector<Results> of_ranks(kWorld);
    test::ThreadChannels channels(kWorld);
    test::as_ranks(
        kWorld,
        [&](comm::Ranks& ranks) {
          of_ranks[ranks.rank()] =
              train({"gradient_clipping=1e-3", "zero_optimization.stage=1", kWeights + "cpu",
                     kOptimizer + "cpu", "ballast.speculative_updates=" + count},
                    sometimes, true, pauses, &ranks);
        },
        [&](std::uint32_t rank, auto) { return channels.make(rank); });
    return of_ranks;
  };
  const std::vector<Results> expected = train_ranks("0", Pauses::never);
  const std::vector<Results> always = train_ranks("9", Pauses::never);
  const std::vector<Results> pausing = train_ranks("9", Pauses::when_it_should);
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    expect_same(always[rank], expected[rank], "always");
    expect_same(pausing[rank], expected[rank], "pausing");
    EXPECT_EQ(always[rank].rolled_back, kSteps);
    EXPECT_EQ(pausing[rank].paused, steps(5, kSteps));
  }
}

}  // namespace
}  // namespace ballast::engine::speculation_test
