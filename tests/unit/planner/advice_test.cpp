#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/plan/lane_times.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"

#include "tests/support/random_run.h"
#include "tests/support/tags.h"
#include "tests/unit/planner/asked.h"

namespace ballast::planner::advice_test {
namespace {

using plan::Lane;

/// The advice for a run of 10 seconds with these lane times, if the simulator finds `variants`.
std::string advice(double compute, Lane lane, double busy,
                   const std::vector<Improvement>& variants) {
  engine::Blueprint blueprint;
  blueprint.problem.micro_batch_tokens = 256;
  blueprint.problem.micro_batches = 2;
  blueprint.problem.sharers = 2;
  plan::LaneTotals lanes;
  lanes.busy_seconds[static_cast<std::size_t>(Lane::compute)] = compute;
  lanes.busy_seconds[static_cast<std::size_t>(lane)] = busy;
  return advise(blueprint, lanes, 10.0, [&] { return variants; });
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

const std::vector<Improvement> kVariants = {{"25% more host memory", 20.0, 2.0},
                                            {"others", 15.0, 1.5}};

TAG_TESTS("slow_sanitized", "Advice.*");
TEST(Advice, ARunBoundByComputeHasItsTransfersHidden) {
  const std::string text = advice(9.5, Lane::fetch, 6.0, kVariants);
  EXPECT_TRUE(says(text, "At 1024 tokens per step")) << text;
  EXPECT_TRUE(says(text, "bound by compute (95% of the time)")) << text;
  EXPECT_FALSE(says(text, "host memory")) << text;
}

TEST(Advice, ASlowLaneIsNamedWithTheBestChangeThatWasSimulated) {
  const std::string text = advice(4.0, Lane::writeback, 8.0, kVariants);
  EXPECT_TRUE(says(text, "compute waits 60% of the time")) << text;
  EXPECT_TRUE(says(text, "writeback (80% of the time)")) << text;
  EXPECT_TRUE(says(text, "Simulated: 25% more host memory would be 2.00x as fast.")) << text;
  EXPECT_FALSE(says(text, "others")) << text;
}

TEST(Advice, NothingIsAdvisedThatWasNotSimulated) {
  const std::string text = advice(4.0, Lane::upload, 7.0, {});
  EXPECT_TRUE(says(text, "No simulated change makes it faster.")) << text;
  plan::LaneTotals lanes;
  EXPECT_TRUE(says(advise({}, lanes, 10.0), "`ballast plan` simulates changes."));
}

TEST(Advice, StepsTooShortForAnyLaneAreReported) {
  EXPECT_TRUE(says(advice(3.0, Lane::upload, 0.5, kVariants), "too short"));
}

TEST(Advice, IsTheSameWhereverItIsPrinted) {
  using plan::find_bottleneck;
  struct Case {
    Lane lane;
    std::string resource;
  };
  for (const Case& one : std::vector<Case>{{Lane::fetch, "NVMe"},
                                           {Lane::writeback, "NVMe"},
                                           {Lane::upload, "link"},
                                           {Lane::offload, "link"},
                                           {Lane::update, "update"},
                                           {Lane::gather, "network"},
                                           {Lane::reduce, "network"}}) {
    std::array<double, plan::kLaneCount> busy{};
    busy[static_cast<std::size_t>(Lane::compute)] = 4.0;
    busy[static_cast<std::size_t>(one.lane)] = 9.5;
    const plan::Bottleneck found = find_bottleneck(busy, 10.0);
    EXPECT_EQ(found.lane, one.lane);
    EXPECT_EQ(found.second, Lane::compute);
    EXPECT_FALSE(found.bound_by_compute());
    const std::string bound = fmt::format("bound by {} ({} 95% of the time); compute waits 60%",
                                          one.resource, to_string(one.lane));
    EXPECT_TRUE(says(describe(found), bound)) << describe(found);
    EXPECT_TRUE(says(advice(4.0, one.lane, 9.5, kVariants), bound));
  }
  // A lane that is nearly as busy as compute changes nothing.
  const std::string text = advice(9.8, Lane::writeback, 9.7, kVariants);
  EXPECT_TRUE(says(text, "bound by compute (98% of the time): transfers are hidden")) << text;
  const std::string waits = advice(6.5, Lane::writeback, 6.0, kVariants);
  EXPECT_TRUE(says(waits, "bound by no lane alone: compute waits 35% of the time")) << waits;
}

/// A request for a model whose states exceed both budgets.
PlanRequest request_for(const std::vector<std::string>& overrides, Bytes host_bytes) {
  const std::string text = R"({
    "model": {"family": "gpt2", "vocab_size": 512, "hidden_size": 128, "num_layers": 10,
              "num_heads": 4},
    "data": {"tokens": "unused.bin", "sequence_length": 64},
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"offload_optimizer": {"device": "nvme"},
                          "offload_param": {"device": "cpu"}},
    "ballast": {"device": "host", "compute_threads": 1}})";
  PlanRequest request = setup::plan_request(config::parse(text, "/", "test", overrides));
  request.budgets = {12 * kMiB, host_bytes};
  request.rates = test::quick_machine();
  // The drives bound the step.
  request.rates.forward = request.rates.backward = request.rates.head = {{64.0, 10e12}};
  request.rates.device_memory_per_second = 1e12;
  if (request.run.model.config.vocabulary_tiles > 1) return request;  // they need further sizes
  request.kernels = [](model::MicroBatchShape shape) {
    return model::KernelSizes{.workspace = shape.tokens() * 4096};
  };
  return request;
}

std::vector<Improvement> improvements_of(const PlanRequest& request) {
  const Decision now = decide(request);
  return find_improvements(now.blueprint, now.prediction, request);
}

std::vector<std::string> changes_with(const PlanRequest& request, const std::string& words) {
  std::vector<std::string> found;
  for (const Improvement& variant : improvements_of(request)) {
    if (says(variant.change, words)) found.push_back(variant.change);
  }
  return found;
}

TEST(Advice, MoreMemoryGoesWithOpenTiersWhereTheConfigNamesThem) {
  const PlanRequest named = request_for({"ballast.order=layer_major"}, 16 * kMiB);
  ASSERT_FALSE(leaves_choices(named.run));
  const std::string more = "25% more host memory (ballast.host_bytes)";
  const auto changes = changes_with(named, more);
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_TRUE(says(changes.front(), "with \"auto\" for all tiers")) << changes.front();
  // Open tiers use more memory without changes.
  const PlanRequest open =
      request_for({"zero_optimization.offload_optimizer.device=auto",
                   "zero_optimization.offload_param.device=auto", "ballast.activations=auto",
                   "ballast.gradients=auto", "ballast.recompute=auto", "ballast.order=auto"},
                  16 * kMiB);
  EXPECT_EQ(changes_with(open, more), std::vector<std::string>{more});
}

TEST(Advice, StatesInEightBitsAreOfferedWhereTheySpareTheDrives) {
  const std::string eight = "ballast.optimizer_states 8bit";
  const PlanRequest swapped = request_for({}, 16 * kMiB);
  const std::vector<Improvement> variants = improvements_of(swapped);
  const auto found =
      std::find_if(variants.begin(), variants.end(),
                   [&](const Improvement& variant) { return says(variant.change, eight); });
  ASSERT_NE(found, variants.end());
  EXPECT_TRUE(says(found->change, "changes results")) << found->change;
  EXPECT_LT(found->wear, 1.0);
  // Advice does not spare drives that are not written to, and states in 8 bits cannot shrink again.
  const PlanRequest on_host =
      request_for({"zero_optimization.offload_optimizer.device=cpu"}, 256 * kMiB);
  EXPECT_TRUE(changes_with(on_host, eight).empty());
  const PlanRequest already = request_for({"ballast.optimizer_states=8bit"}, 16 * kMiB);
  EXPECT_TRUE(changes_with(already, eight).empty());
}

/// The message of the refusal.
std::string refusal(const PlanRequest& request) {
  try {
    static_cast<void>(decide(request));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Advice, ASequenceThatIsTooLongIsShortenedOnlyIfNothingElseHelps) {
  const std::vector<std::string> least = {
      "model.family=llama", "train_batch_size=1", "train_micro_batch_size_per_gpu=1",
      "zero_optimization.offload_param.device=nvme", "ballast.activations=nvme"};
  std::vector<std::string> overrides = least;
  overrides.emplace_back("data.sequence_length=16384");
  const std::string message = refusal(request_for(overrides, 64 * kMiB));
  const std::string key = "it would fit with --set data.sequence_length=";
  ASSERT_TRUE(says(message, key)) << message;
  const std::uint64_t length = std::stoull(message.substr(message.find(key) + key.size()));
  overrides.back() = fmt::format("data.sequence_length={}", length);
  EXPECT_EQ(refusal(request_for(overrides, 64 * kMiB)), "");
  overrides.back() = fmt::format("data.sequence_length={}", 2 * length);
  EXPECT_NE(refusal(request_for(overrides, 64 * kMiB)), "");
  // Smaller micro-batches fit.
  overrides[1] = "train_batch_size=64";
  overrides[2] = "train_micro_batch_size_per_gpu=64";
  overrides.back() = "data.sequence_length=64";
  const std::string other = refusal(request_for(overrides, 256 * kMiB));
  EXPECT_TRUE(says(other, "train_micro_batch_size_per_gpu=")) << other;
  EXPECT_FALSE(says(other, "sequence_length")) << other;
}

/// A run whose rates are those of the host device, so that a build with CUDA takes the sizes of the
/// host's kernels, too.
test::Asked on_host(const std::vector<std::string>& overrides, memory::Budgets budgets) {
  test::Asked asked(overrides, budgets);
  asked.config.ballast.compute_threads = 1;
  asked.rates.shared_cores = asked.rates.compute_threads = asked.rates.update_threads = 1;
  return asked;
}

/// The largest block is the embedding with the output matrix. Only tiles make it smaller.
TEST(Advice, TilesOfALargeVocabularyAreNamedAndTaken) {
  const std::vector<std::string> large = {"model.vocab_size=16384"};
  const test::Asked asked =
      on_host({large[0], "model.vocabulary_tiles=1"}, {16 * kMiB, 512 * kMiB});
  const std::string message = asked.refusal();
  const std::string words = "it would fit with --set model.vocabulary_tiles=";
  const auto at = message.find(words);
  ASSERT_NE(at, std::string::npos) << message;
  const std::uint64_t tiles = std::stoull(message.substr(at + words.size()));
  EXPECT_EQ(
      on_host({large[0], fmt::format("model.vocabulary_tiles={}", tiles)}, asked.budgets).refusal(),
      "");
  // Only a number that the config leaves open is raised.
  EXPECT_EQ(fitting_tiles(asked.request()).vocabulary_tiles, 1U);
  const test::Asked open = on_host(large, asked.budgets);
  EXPECT_EQ(fitting_tiles(open.request()).vocabulary_tiles, tiles);
  const test::Asked roomy = on_host(large, {512 * kMiB, 512 * kMiB});
  EXPECT_EQ(fitting_tiles(roomy.request()).vocabulary_tiles, 1U);
}

TEST(Advice, DrivesThatAreTooSmallAreNotAdvised) {
  const std::vector<std::string> on_host = {"zero_optimization.offload_optimizer.device=cpu"};
  PlanRequest request = request_for(on_host, 12 * kMiB);
  const std::string nvme = "zero_optimization.offload_optimizer.device=nvme";
  EXPECT_TRUE(says(refusal(request), nvme)) << refusal(request);
  request.rates.nvme_bytes = 1 * kMiB;
  EXPECT_FALSE(says(refusal(request), "nvme")) << refusal(request);
}

TEST(Advice, MoreMemoryThatAddsNothingToOpenTiersIsNotAdvised) {
  // With open tiers everything fits into this host memory.
  const PlanRequest named = request_for({}, 256 * kMiB);
  EXPECT_FALSE(changes_with(named, "\"auto\" for all tiers").empty());
  EXPECT_TRUE(changes_with(named, "more host memory").empty());
}

TEST(Advice, BatchChangesAreCompleteAndReachTheirPredictedSpeed) {
  const PlanRequest request = request_for({}, 16 * kMiB);
  const std::string keys = "train_batch_size 32, gradient_accumulation_steps 8";
  const std::vector<Improvement> variants = improvements_of(request);
  const auto found =
      std::find_if(variants.begin(), variants.end(),
                   [&](const Improvement& variant) { return says(variant.change, keys); });
  ASSERT_NE(found, variants.end());
  const Decision changed =
      decide(request_for({"train_batch_size=32", "gradient_accumulation_steps=8"}, 16 * kMiB));
  EXPECT_DOUBLE_EQ(found->tokens_per_second,
                   static_cast<double>(changed.blueprint.problem.tokens_per_step()) /
                       changed.prediction.step_seconds);
}

}  // namespace
}  // namespace ballast::planner::advice_test
