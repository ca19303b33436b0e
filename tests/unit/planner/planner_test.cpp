#include <algorithm>
#include <atomic>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/memory/ledger.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "src/planner/search.h"
#include "tests/support/tags.h"
#include "tests/support/zero_memory.h"
#include "tests/unit/planner/asked.h"

namespace ballast::planner::planner_test {
namespace {

using test::Asked;
using test::kernels;
using test::kRoomy;
using test::kTight;
using test::make_config;

double speed(const Decision& decision) {
  return static_cast<double>(decision.blueprint.problem.tokens_per_step()) /
         decision.prediction.step_seconds;
}

TEST(Planner, KeepsEverythingOnAFastDeviceWithRoom) {
  Asked asked({}, kRoomy);
  asked.rates.device_memory_per_second = 2e12;
  const Decision decision = asked.decide();
  for (const auto& block : decision.blueprint.placement.blocks) {
    EXPECT_EQ(block.weights, Tier::device);
    EXPECT_EQ(block.optimizer, Tier::device);
    EXPECT_EQ(block.activations, Tier::device);
  }
}

TEST(Planner, LeavesNothingToChoose) {
  for (const memory::Budgets& budgets : {kRoomy, kTight, memory::Budgets{20 * kMiB, 6 * kMiB}}) {
    const Asked asked({}, budgets);
    EXPECT_TRUE(leaves_choices(asked.request().run));
    const Decision decision = asked.decide();
    const config::Config settled = asked.settled(decision);
    EXPECT_FALSE(setup::leaves_choices(settled));
    EXPECT_TRUE(decision.blueprint.ledger.fits(budgets));
    EXPECT_EQ(settled.batch.micro_batch * settled.batch.accumulation, 16U);
    EXPECT_EQ(settled.ballast.device_bytes, budgets.device);
    EXPECT_EQ(settled.ballast.host_bytes, budgets.host);
  }
}

TEST(Planner, ChoosesTheOrderThatLeavesRoomForIntermediates) {
  const std::vector<std::string> fixed = {"train_micro_batch_size_per_gpu=1",
                                          "gradient_accumulation_steps=16",
                                          "zero_optimization.offload_optimizer.device=none",
                                          "zero_optimization.offload_param.device=none"};
  const auto decide = [&](const std::string& order, Bytes device) {
    std::vector<std::string> overrides = fixed;
    overrides.push_back("ballast.order=" + order);
    Asked asked(overrides, {device, 256 * kMiB});
    asked.rates.device_memory_per_second = 2e12;
    return asked.decide();
  };
  const auto kept = [](const Decision& decision) {
    const auto& blocks = decision.blueprint.placement.blocks;
    return std::count_if(blocks.begin(), blocks.end(),
                         [](const auto& block) { return block.kept == step::Kept::all; });
  };
  // Room for the intermediates of one micro-batch and all states, but not for those of sixteen.
  const Decision by_micro_batch = decide("micro_batch_major", 256 * kMiB);
  const Bytes enough = by_micro_batch.blueprint.ledger.total(Tier::device);
  ASSERT_EQ(kept(by_micro_batch),
            static_cast<std::ptrdiff_t>(by_micro_batch.blueprint.model.config.num_layers));
  ASSERT_LT(kept(decide("layer_major", enough)), kept(by_micro_batch));
  const Decision open = decide("auto", enough);
  EXPECT_EQ(open.blueprint.options.order, step::Order::micro_batch_major);
  EXPECT_GE(speed(open), 0.999 * speed(decide("layer_major", enough)));
  const config::Config settled = setup::settle(make_config(fixed), open.blueprint);
  EXPECT_FALSE(setup::leaves_choices(settled));
  EXPECT_EQ(settled.ballast.order, step::Order::micro_batch_major);
  EXPECT_EQ(settled.ballast.kept, step::Kept::all);
}

TEST(Planner, ItsConfigDrawsItsBlueprintEvenWhenPrintedAndReadBack) {
  const Asked asked({}, kTight);
  const Decision decision = asked.decide();
  const config::Config again =
      config::parse(config::print(asked.settled(decision)), "/elsewhere", "printed", {});
  const engine::Blueprint drawn = draw_blueprint(
      setup::translate(again), {again.ballast.device_bytes, again.ballast.host_bytes},
      kernels(asked.model, {again.batch.micro_batch, again.data.sequence_length}));
  EXPECT_EQ(drawn.placement.blocks, decision.blueprint.placement.blocks);
  EXPECT_EQ(drawn.options, decision.blueprint.options);
  EXPECT_EQ(drawn.micro_batches, decision.blueprint.micro_batches);
  EXPECT_EQ(drawn.ledger.lines().size(), decision.blueprint.ledger.lines().size());
  for (const Tier tier : kTiers) {
    EXPECT_EQ(drawn.ledger.total(tier), decision.blueprint.ledger.total(tier));
  }
}

TEST(Planner, SizesOnlyMicroBatchesThatItTries) {
  const Asked asked({}, kRoomy);
  PlanRequest request = asked.request();
  request.threads = 1;
  // After a plan fits, steps with more operations than a sixteenth of this are left out.
  request.work_limit = 1600;
  std::set<std::uint64_t> sized;
  request.kernels = [&](model::MicroBatchShape shape) {
    sized.insert(shape.sequences);
    return kernels(asked.model, shape);
  };
  static_cast<void>(decide(request));
  // 12 blocks twice per micro-batch: 4 sequences need at least 96 operations, 2 need 192.
  EXPECT_EQ(sized, (std::set<std::uint64_t>{4, 8, 16}));
}

TEST(Planner, KeepsWhatTheConfigNames) {
  const Asked asked(
      {"zero_optimization.offload_optimizer.device=nvme",
       "zero_optimization.offload_optimizer.buffer_count=4", "train_micro_batch_size_per_gpu=2",
       R"(ballast.placement=[{"blocks": "3-4", "weights": "host"}])"},
      kRoomy);
  const Decision decision = asked.decide();
  EXPECT_EQ(decision.blueprint.shape.sequences, 2U);
  EXPECT_EQ(decision.blueprint.micro_batches, 8U);
  EXPECT_EQ(decision.blueprint.options.buffers.state_staging, 4U);
  const auto& blocks = decision.blueprint.placement.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    EXPECT_EQ(blocks[b].optimizer, Tier::nvme) << b;
    EXPECT_EQ(blocks[b].weights == Tier::host, b == 3 || b == 4) << b;
  }
}

TEST(Planner, IsAtLeastAsFastAsTheDefaultProgramAndEverythingInOnePlace) {
  for (const memory::Budgets& budgets :
       {kTight, memory::Budgets{20 * kMiB, 6 * kMiB}, memory::Budgets{10 * kMiB, 40 * kMiB}}) {
    const Asked asked({}, budgets);
    const double chosen = speed(asked.decide());
    for (const std::uint64_t size : {1U, 2U, 4U, 8U, 16U}) {
      engine::RunInputs run = asked.request().run;
      run.batch = run.batch.with_samples(size, 1);
      for (const std::optional<Tier> tier :
           {std::optional<Tier>(), std::optional(Tier::nvme), std::optional(Tier::host)}) {
        run.constraints.placement.optimizer = tier;
        try {
          const engine::Blueprint other =
              draw_blueprint(run, budgets, kernels(asked.model, {size, 64}));
          const double seconds = plan::simulate(other.schedule, asked.rates).step_seconds;
          const auto tokens = static_cast<double>(other.problem.tokens_per_step());
          EXPECT_GE(chosen, 0.995 * tokens / seconds) << size;
        } catch (const Error& error) {
          EXPECT_EQ(error.category(), ErrorCategory::memory);
        }
      }
    }
  }
}

/// A random placement, micro-batch size and number of buffers; false if they do not fit.
bool draw_at_random(const Asked& asked, std::uint64_t seed, double& tokens_per_second) {
  std::uint64_t drawn = 0;
  const auto below = [&](std::uint64_t n) { return random_u64(seed, drawn++, 0) % n; };
  const auto tier = [&] { return kTiers.at(below(3)); };
  const std::uint64_t size = std::uint64_t{1} << below(5);
  const engine::RunInputs run = asked.request().run;
  engine::Blueprint other = engine::outline(run, run.batch.with_samples(size, 1), asked.budgets,
                                            kernels(asked.model, {size, 64}), {});
  other.options.buffers.state_staging = static_cast<std::uint32_t>(1 + below(6));
  other.options.buffers.weight_staging = static_cast<std::uint32_t>(1 + below(6));
  const step::BlockPlacement most = {tier(), tier(), tier()};
  const std::uint64_t changed = below(3) * below(asked.model.blocks.size());
  step::Placement placement{std::vector<step::BlockPlacement>(asked.model.blocks.size(), most)};
  for (std::uint64_t i = 0; i < changed; ++i) {
    placement.blocks.at(below(placement.blocks.size())) = {tier(), tier(), tier()};
  }
  if (!engine::make_ledger(step::list_buffers(other.problem, placement, other.options))
           .fits(asked.budgets)) {
    return false;
  }
  const plan::Schedule schedule = step::build(other.problem, placement, other.options);
  tokens_per_second = static_cast<double>(other.problem.tokens_per_step()) /
                      plan::simulate(schedule, asked.rates).step_seconds;
  return true;
}

TEST(Planner, IsAtLeastAsFastAsAnyPlanDrawnAtRandom) {
  std::size_t fitting = 0;
  for (const memory::Budgets& budgets :
       {kTight, memory::Budgets{10 * kMiB, 40 * kMiB}, memory::Budgets{20 * kMiB, 20 * kMiB}}) {
    const Asked asked({}, budgets);
    const double chosen = speed(asked.decide());
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      double other = 0.0;
      if (!draw_at_random(asked, seed, other)) continue;
      ++fitting;
      EXPECT_GE(chosen, 0.995 * other) << "seed " << seed;
    }
  }
  EXPECT_GT(fitting, 100U);
}

TEST(Planner, GivesTheSameAnswerWithAnyNumberOfThreads) {
  for (const memory::Budgets& budgets : {kRoomy, kTight, memory::Budgets{20 * kMiB, 6 * kMiB}}) {
    const Asked asked({}, budgets);
    PlanRequest request = asked.request();
    request.threads = 1;
    const Decision alone = decide(request);
    EXPECT_GT(alone.simulated, 1U);
    for (const std::size_t threads : {2, 5}) {
      request.threads = threads;
      const Decision shared = decide(request);
      EXPECT_EQ(config::print(asked.settled(shared)), config::print(asked.settled(alone)));
      EXPECT_EQ(shared.prediction.step_seconds, alone.prediction.step_seconds);
      EXPECT_EQ(shared.simulated, alone.simulated);
    }
  }
}

TEST(Planner, PredictsANamedConfigAsItIs) {
  const Asked asked({"zero_optimization.offload_optimizer.device=cpu",
                     "zero_optimization.offload_param.device=cpu", "ballast.activations=device",
                     "train_micro_batch_size_per_gpu=4"},
                    kRoomy);
  EXPECT_FALSE(leaves_choices(asked.request().run));
  const Decision decision = asked.decide();
  EXPECT_EQ(decision.simulated, 1U);
  EXPECT_EQ(decision.blueprint.options, step::Options());
  EXPECT_EQ(asked.settled(decision).buffers.state_staging, 0U);
}

TEST(Planner, DoesWithoutDrivesWhereThereAreNone) {
  Asked asked({}, kRoomy);
  asked.rates.read_per_second = asked.rates.write_per_second = asked.rates.mixed_per_second = 0.0;
  EXPECT_EQ(asked.decide().blueprint.ledger.total(Tier::nvme), 0U);
  asked.config = make_config({"zero_optimization.offload_optimizer.device=nvme"});
  try {
    static_cast<void>(asked.decide());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_NE(std::string(error.what()).find("test machine"), std::string::npos) << error.what();
  }
}

TEST(Planner, PutsGradientsOnNvmeOnlyWhereNothingElseFits) {
  const std::vector<std::string> open = {"ballast.gradients=auto"};
  const auto settled = [](const Asked& asked) { return asked.settled(asked.decide()); };
  EXPECT_EQ(config::print(settled(Asked(open, kTight))), config::print(settled(Asked({}, kTight))));
  constexpr memory::Budgets kSmall = {14 * kMiB, 4 * kMiB};
  const Asked on_host({"ballast.gradients=host"}, kSmall);
  EXPECT_NE(on_host.refusal().find("ballast.gradients=auto"), std::string::npos);
  const Decision decision = Asked(open, kSmall).decide();
  EXPECT_GT(decision.blueprint.ledger.total(Tier::nvme), 0U);
  EXPECT_TRUE(decision.blueprint.ledger.fits(kSmall));
  const config::Config small = Asked(open, kSmall).settled(decision);
  EXPECT_FALSE(setup::leaves_choices(small));
  const std::string text = config::print(small);
  EXPECT_NE(text.find("\"gradients\": \"nvme\""), std::string::npos) << text;
}

TEST(Planner, EndsWhenItIsInterrupted) {
  const std::atomic<bool> interrupted = true;
  PlanRequest request = Asked({}, kTight).request();
  request.interrupted = &interrupted;
  try {
    static_cast<void>(decide(request));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::interrupted);
  }
}

TEST(Planner, NamesHelpfulChanges) {
  const Asked asked({"zero_optimization.offload_optimizer.device=nvme",
                     "train_micro_batch_size_per_gpu=1", "train_batch_size=1"},
                    kTight);
  const Decision decision = asked.decide();
  const std::vector<Improvement> variants =
      find_improvements(decision.blueprint, decision.prediction, asked.request());
  ASSERT_FALSE(variants.empty());
  EXPECT_TRUE(std::is_sorted(
      variants.begin(), variants.end(),
      [](const Improvement& a, const Improvement& b) { return a.speedup > b.speedup; }));
  const auto named = [&](const std::string& words) {
    return std::any_of(variants.begin(), variants.end(), [&](const Improvement& variant) {
      return variant.change.find(words) != std::string::npos;
    });
  };
  EXPECT_TRUE(named("4x the tokens per step (train_batch_size 4, gradient_accumulation_steps 4)"));
  EXPECT_TRUE(named("twice the drives"));
  for (const Improvement& variant : variants) {
    EXPECT_GE(variant.speedup, 1.02) << variant.change;
    EXPECT_NEAR(variant.tokens_per_second, variant.speedup * speed(decision),
                1e-9 * variant.tokens_per_second);
  }
}

TEST(Planner, SplitsTheBatchOverRanks) {
  Asked asked({"zero_optimization.stage=3"}, kRoomy);
  asked.mesh.data = 4;
  asked.rates.fabric_per_second = 2e9;
  asked.rates.ranks_per_node = 4;
  const Decision decision = asked.decide();
  EXPECT_EQ(decision.blueprint.shape.sequences * decision.blueprint.micro_batches, 4U);
  EXPECT_EQ(decision.blueprint.problem.tokens_per_step(), 16U * 64U);
  EXPECT_EQ(decision.blueprint.problem.sharers, 4U);
  EXPECT_EQ(decision.blueprint.problem.stage, 3U);
  asked.mesh.data = 3;
  try {
    static_cast<void>(asked.decide());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_NE(std::string(error.what()).find("16 sequences"), std::string::npos) << error.what();
  }
}

/// Bytes of a rank for the states of a 7.5B-parameter model, all on the device.
step::StateBytes ledger_of_rank(std::uint32_t world, int stage, double& parameters) {
  const config::Config config = make_config(
      {"model.hidden_size=4096", "model.num_layers=37", "model.num_heads=32", "train_batch_size=1",
       "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=1",
       "zero_optimization.stage=" + std::to_string(stage), "model.vocab_size=16384"});
  const model::Architecture model = model::build_architecture(config.model);
  parameters = static_cast<double>(model.parameters());
  const engine::Blueprint drawn =
      engine::outline(setup::translate(config), {.host = 1024 * kGiB}, {}, {.data = world});
  const step::Placement placement = {std::vector<step::BlockPlacement>(model.blocks.size())};
  const memory::Ledger ledger =
      engine::make_ledger(step::list_buffers(drawn.problem, placement, drawn.options));
  step::StateBytes bytes = {0.0, 0.0, 0.0};
  for (const memory::LedgerLine& line : ledger.lines()) {
    if (line.tier != Tier::device) continue;
    const auto size = static_cast<double>(line.bytes);
    if (line.kind == to_string(plan::Kind::weights)) bytes.weights = size;
    if (line.kind == to_string(plan::Kind::gradients)) bytes.gradients = size;
    if (line.kind == to_string(plan::Kind::states)) bytes.optimizer = size;
  }
  return bytes;
}

TEST(Planner, GivesARankTheStatesThatTheZeroPaperGivesIt) {
  for (const std::uint32_t world : {1U, 4U, 16U, 64U, 256U, 1024U}) {
    for (int stage = 0; stage <= 3; ++stage) {
      double parameters = 0.0;
      const step::StateBytes ours = ledger_of_rank(world, stage, parameters);
      EXPECT_NEAR(parameters, 7.5e9, 0.1e9);
      const auto expected = [&](int at) {
        return step::zero_memory(parameters, world, at, step::kOwnStateBytes);
      };
      const auto expect_near = [&](double bytes, double exact, double padding) {
        EXPECT_GE(bytes, exact) << world << " ranks, stage " << stage;
        EXPECT_LE(bytes, exact + padding) << world << " ranks, stage " << stage;
      };
      // In each of the 39 blocks, shards are whole pages, and the three arrays of states have gaps
      // between them.
      constexpr double kBlocks = 39.0;
      const double whole = kBlocks * world * kPage;
      const double part = kBlocks * kPage;
      const double apart = kBlocks * (3.0 * (cpu_adam::kArraySkew + kCacheLine) + 2.0 * kPage);
      expect_near(ours.weights, expected(stage).weights, stage < 3 ? whole : part);
      expect_near(ours.gradients, expected(stage).gradients, stage < 2 ? whole : part);
      expect_near(ours.optimizer, expected(stage).optimizer, 5.0 * part + apart);
    }
  }
}

TAG_TESTS("slow_sanitized", "PlannerRefusal.*");
TEST(PlannerRefusal, NamesTheLineAndABudgetThatIsEnough) {
  const Asked asked({}, {2 * kMiB, 64 * kMiB});
  const std::string message = asked.refusal();
  EXPECT_EQ(message.rfind("the device budget of 2.00 MiB is ", 0), 0U) << message;
  const std::string words = "; it would fit with device memory of ";
  const auto found = message.find(words);
  ASSERT_NE(found, std::string::npos) << message;
  Asked raised = asked;
  raised.budgets.device = parse_bytes(message.substr(found + words.size()));
  EXPECT_EQ(raised.refusal(), "");
}

TEST(PlannerRefusal, NeedsNoRates) {
  for (const Bytes device : {2 * kMiB, 20 * kMiB, 256 * kMiB}) {
    Asked asked({}, {device, 64 * kMiB});
    const bool fits = asked.refusal().empty();
    asked.rates = {};
    if (fits) require_fit(asked.request());
    if (!fits) {
      EXPECT_THROW(require_fit(asked.request()), Error);
    }
  }
}

/// Every change that a refusal advises: the arguments of --set that belong together.
std::vector<std::vector<std::string>> advised(const std::string& message) {
  const std::string words = "it would fit with ";
  const auto found = message.find(words);
  if (found == std::string::npos) return {};
  std::vector<std::vector<std::string>> ways(1);
  std::istringstream text(message.substr(found + words.size()));
  for (std::string word; text >> word;) {
    if (word == "or") ways.emplace_back();
    if (word == "or" || word == "with" || word == "--set") continue;
    if (word.ends_with(",")) word.pop_back();
    ways.back().push_back(word);
  }
  return ways;
}

/// Expects that `overrides` with named budgets do not fit, and that they fit with each change that
/// the refusal advises. Returns the refusal.
std::string expect_advice_that_fits(std::vector<std::string> overrides,
                                    const memory::Budgets& budgets) {
  overrides.push_back(fmt::format("ballast.device_bytes={}", budgets.device));
  overrides.push_back(fmt::format("ballast.host_bytes={}", budgets.host));
  std::string message = Asked(overrides, budgets).refusal();
  const auto ways = advised(message);
  EXPECT_FALSE(ways.empty()) << message;
  for (const auto& way : ways) {
    std::vector<std::string> all = overrides;
    all.insert(all.end(), way.begin(), way.end());
    const config::BallastSection named = make_config(all).ballast;
    EXPECT_EQ(Asked(all, {named.device_bytes, named.host_bytes}).refusal(), "") << message;
  }
  return message;
}

TEST(PlannerRefusal, FindsTheLargestSmallerMicroBatch) {
  const Asked asked({"train_micro_batch_size_per_gpu=16"}, {6 * kMiB, 64 * kMiB});
  const std::string message = asked.refusal();
  const auto ways = advised(message);
  ASSERT_FALSE(ways.empty()) << message;
  const std::string key = "train_micro_batch_size_per_gpu=";
  ASSERT_EQ(ways.front().front().rfind(key, 0), 0U) << message;
  const std::uint64_t size = std::stoull(ways.front().front().substr(key.size()));
  Asked smaller = asked;
  smaller.config = make_config({key + std::to_string(size)});
  EXPECT_EQ(smaller.refusal(), "");
  smaller.config = make_config({key + std::to_string(2 * size)});
  EXPECT_NE(smaller.refusal(), "");
}

TEST(PlannerRefusal, FindsATierBelow) {
  const std::string small = "train_micro_batch_size_per_gpu=1";
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const auto found = [](const std::string& message, const std::string& words) {
    return message.find("it would fit with --set " + words) != std::string::npos;
  };
  const std::string rich =
      expect_advice_that_fits({optimizer + "none", small}, {20 * kMiB, 64 * kMiB});
  EXPECT_TRUE(found(rich, optimizer + "cpu")) << rich;
  const std::string poor =
      expect_advice_that_fits({optimizer + "cpu", small}, {20 * kMiB, 12 * kMiB});
  EXPECT_TRUE(found(poor, optimizer + "nvme")) << poor;
}

TEST(PlannerRefusal, NeverAdvisesPresentSettings) {
  const std::vector<std::string> lowest = {"zero_optimization.offload_optimizer.device=nvme",
                                           "zero_optimization.offload_param.device=nvme"};
  const auto expect_other_advice = [&](const char* micro_batch, const char* activations,
                                       const memory::Budgets& budgets) {
    std::vector<std::string> overrides = lowest;
    overrides.push_back("ballast.activations=" + std::string(activations));
    overrides.push_back("train_micro_batch_size_per_gpu=" + std::string(micro_batch));
    const std::string message = expect_advice_that_fits(overrides, budgets);
    EXPECT_EQ(message.find("device=nvme"), std::string::npos) << message;
  };
  expect_other_advice("1", "device", {2 * kMiB, 64 * kMiB});
  expect_other_advice("1", "nvme", {1 * kMiB, 1 * kMiB});
  expect_other_advice("8", "host", {64 * kMiB, 1 * kMiB});
  expect_other_advice("8", "auto", {2 * kMiB, 2 * kMiB});
}

TEST(PlannerRefusal, AdvisesNoDrivesWhereThereAreNone) {
  Asked asked({"zero_optimization.offload_optimizer.device=cpu",
               "zero_optimization.offload_param.device=cpu", "train_micro_batch_size_per_gpu=1"},
              {20 * kMiB, 12 * kMiB});
  EXPECT_NE(asked.refusal().find("=nvme"), std::string::npos) << asked.refusal();
  asked.rates.read_per_second = asked.rates.write_per_second = asked.rates.mixed_per_second = 0.0;
  EXPECT_EQ(asked.refusal().find("=nvme"), std::string::npos) << asked.refusal();
}

}  // namespace
}  // namespace ballast::planner::planner_test
