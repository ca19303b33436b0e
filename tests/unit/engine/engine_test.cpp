#include "ballast/engine/engine.h"

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/engine/state_layout.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::engine {
namespace {

const std::string kModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 3, "num_heads": 4)";
const std::string kWeights = "zero_optimization.offload_param.device=";
const std::string kOptimizer = "zero_optimization.offload_optimizer.device=";

class EngineTest : public testing::Test {
 protected:
  [[nodiscard]] config::Config config(const std::vector<std::string>& overrides = {}) const {
    return test::tiny_config(kModel, true, directory.path(), overrides);
  }
  [[nodiscard]] std::vector<std::int32_t> ids(const Engine& engine, int seed) const {
    std::vector<std::int32_t> out(engine.blueprint().tokens_per_step());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::int32_t>((i * 31 + static_cast<std::size_t>(seed) * 17) % 131);
    }
    return out;
  }

  test::TempDir directory;
};

TEST_F(EngineTest, WhatIsAllocatedIsWhatTheLedgerSays) {
  for (const char* tier : {"none", "cpu", "nvme"}) {
    Engine engine(config({kWeights + tier, kOptimizer + tier}), nullptr);
    engine.start();
    const auto totals = engine.totals();
    for (const Tier t : kTiers) {
      EXPECT_EQ(totals.allocated[static_cast<std::size_t>(t)], engine.blueprint().ledger.total(t))
          << tier << ", " << to_string(t);
    }
  }
}

TEST_F(EngineTest, TheLedgerOfEveryStateFormatIsWhatIsAllocated) {
  for (const char* optimizer : {"AdamW", "Adagrad", "Lion", "SGD"}) {
    for (const char* states : {"fp32", "8bit"}) {
      Engine engine(config({kOptimizer + "nvme", std::string("ballast.optimizer_states=") + states,
                            R"(optimizer={"type": ")" + std::string(optimizer) + "\"}"}),
                    nullptr);
      engine.start();
      Bytes sum = 0;
      for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
        sum += state_layout(engine.blueprint(), b).state_bytes;
      }
      const auto nvme = static_cast<std::size_t>(Tier::nvme);
      EXPECT_EQ(engine.totals().allocated[nvme], sum) << optimizer << ", " << states;
      EXPECT_EQ(engine.blueprint().ledger.total(Tier::nvme), sum) << optimizer << ", " << states;
    }
  }
}

TEST_F(EngineTest, TheConfigNamesOptimizerAndStateFormat) {
  using cpu_adam::Moments;
  const auto states = [&](const std::string& optimizer, const std::string& format) {
    return Engine(config({"optimizer=" + optimizer, "ballast.optimizer_states=" + format}), nullptr)
        .blueprint()
        .states;
  };
  const std::pair<const char*, cpu_adam::Optimizer> optimizers[] = {
      {R"({"type": "AdamW"})", cpu_adam::Optimizer::adamw},
      {R"({"type": "Adam"})", cpu_adam::Optimizer::adamw},
      {R"({"type": "Adam", "params": {"adam_w_mode": false}})", cpu_adam::Optimizer::adam},
      {R"({"type": "Adagrad"})", cpu_adam::Optimizer::adagrad},
      {R"({"type": "Lion"})", cpu_adam::Optimizer::lion},
      {R"({"type": "SGD"})", cpu_adam::Optimizer::sgd}};
  for (const auto& [section, optimizer] : optimizers) {
    EXPECT_EQ(states(section, "fp32").optimizer, optimizer) << section;
  }
  EXPECT_EQ(states("{}", "fp32").moments, Moments::Format::f32);
  EXPECT_EQ(states("{}", "bf16_first").moments, Moments::Format::bf16_first);
  EXPECT_EQ(states("{}", "8bit").moments, Moments::Format::blockwise8);
}

TEST_F(EngineTest, OtherArithmeticOfMomentsIsSaidInOneLine) {
  const auto moments = [&](const std::string& states) {
    const Engine engine(config({"ballast.optimizer_states=" + states}), nullptr);
    std::string found;
    for (const auto& line : describe_placement(engine.blueprint())) {
      if (line.starts_with("moments ")) found += line;
    }
    return found;
  };
  EXPECT_EQ(moments("fp32"), "");
  EXPECT_NE(moments("8bit").find("in 8 bits; results differ from those with fp32 states"),
            std::string::npos);
  EXPECT_NE(moments("bf16_first").find("first in bf16; results differ"), std::string::npos);
}

TEST_F(EngineTest, ANumaNodeThatIsNotThereIsAConfigError) {
  try {
    const Engine engine(config({"ballast.update_numa_node=1000"}), nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
  }
}

TEST_F(EngineTest, AutomaticPlacementFillsTheFastestTierThatFits) {
  const Engine roomy(config({kWeights + "auto", kOptimizer + "auto"}), nullptr);
  for (const auto& block : roomy.blueprint().placement.blocks) {
    EXPECT_EQ(block.weights, Tier::device);
    EXPECT_EQ(block.optimizer, Tier::device);
  }
  const Engine base(config({kWeights + "cpu", kOptimizer + "nvme", "ballast.recompute=true"}),
                    nullptr);
  const memory::Ledger& ledger = base.blueprint().ledger;
  const auto& work = base.blueprint().workload.blocks;
  ASSERT_GT(work[1].state_bytes, work[0].state_bytes);
  // Room on the host for the states of the embedding, not for those of a layer; none on the device.
  const Engine tight(config({kWeights + "cpu", kOptimizer + "auto",
                             fmt::format("ballast.device_bytes={}", ledger.total(Tier::device)),
                             fmt::format("ballast.host_bytes={}",
                                         ledger.total(Tier::host) + work[0].state_bytes)}),
                     nullptr);
  const auto& blocks = tight.blueprint().placement.blocks;
  EXPECT_EQ(blocks.front().optimizer, Tier::host);
  EXPECT_EQ(blocks[1].optimizer, Tier::nvme);
  EXPECT_TRUE(tight.blueprint().ledger.fits(tight.blueprint().budgets));
}

TEST_F(EngineTest, LayersKeepTheirIntermediatesWhereThereIsRoomAndTheLastOnesFirst) {
  const auto kept = [this](const std::vector<std::string>& overrides) {
    const Engine engine(config(overrides), nullptr);
    std::vector<bool> keeps;
    for (const auto& block : engine.blueprint().placement.blocks) {
      keeps.push_back(block.keeps_intermediates);
    }
    return keeps;
  };
  using Kept = std::vector<bool>;
  EXPECT_EQ(kept({}), (Kept{false, true, true, true, false}));
  EXPECT_EQ(kept({"ballast.recompute=true"}), (Kept{false, false, false, false, false}));
  const Engine none(config({"ballast.recompute=true"}), nullptr);
  const schedule::Workload& work = none.blueprint().workload;
  const Bytes before = none.blueprint().ledger.total(Tier::device);
  const Bytes layer = work.micro_batches * work.blocks[1].intermediate_bytes;
  ASSERT_GT(layer, 0U);
  const auto with_bytes = [&](Bytes bytes) {
    return kept({fmt::format("ballast.device_bytes={}", bytes)});
  };
  EXPECT_EQ(with_bytes(before + layer - 1), (Kept{false, false, false, false, false}));
  EXPECT_EQ(with_bytes(before + layer), (Kept{false, false, false, true, false}));
  EXPECT_EQ(with_bytes(before + 2 * layer), (Kept{false, false, true, true, false}));
  const std::string first_again = R"(ballast.placement=[{"blocks": "0-1", "recompute": true}])";
  EXPECT_EQ(kept({first_again}), (Kept{false, false, true, true, false}));
  EXPECT_EQ(kept({"ballast.recompute=false", first_again}),
            (Kept{false, false, true, true, false}));
  const std::string too_little = fmt::format("ballast.device_bytes={}", before);
  EXPECT_THROW(Engine(config({"ballast.recompute=false", too_little}), nullptr), Error);
}

TEST_F(EngineTest, ABudgetTooSmallIsFoundBeforeAnythingIsAllocated) {
  try {
    const Engine engine(config({"ballast.device_bytes=256KiB"}), nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(std::string(error.what()).find("device budget of 256 KiB"), std::string::npos)
        << error.what();
  }
}

TEST_F(EngineTest, ANonFiniteGradientLeavesEveryStateAsItWas) {
  Engine engine(config({kOptimizer + "nvme"}), nullptr);
  engine.start([](const model::TensorSpec& tensor, std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.01F);
    if (tensor.name.ends_with("up_proj.weight")) {
      out[0] = std::numeric_limits<float>::infinity();
    }
  });
  const std::uint64_t before = engine.state_hash();
  const StepResult result = engine.train_step(ids(engine, 1), ids(engine, 2), 0.1);
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(engine.updates(), 0U);
  EXPECT_EQ(engine.state_hash(), before);
}

TEST_F(EngineTest, AnEagerUpdateRefusesANonFiniteGradientByName) {
  Engine engine(config({"ballast.update=eager", "gradient_clipping=0"}), nullptr);
  engine.start([](const model::TensorSpec& tensor, std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.01F);
    if (tensor.name.ends_with("up_proj.weight")) {
      out[0] = std::numeric_limits<float>::infinity();
    }
  });
  try {
    engine.train_step(ids(engine, 1), ids(engine, 2), 0.1);
    engine.finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::numeric);
    const std::string message = error.what();
    EXPECT_NE(message.find("update on the device of "), std::string::npos) << message;
    EXPECT_NE(message.find("ballast.update \"gated\""), std::string::npos) << message;
  }
}

/// Losses, norms and states of whole and partial steps, with an evaluation in between.
struct PartialRun {
  std::vector<double> numbers;
  std::uint64_t states = 0;
  bool operator==(const PartialRun&) const = default;
};

TEST_F(EngineTest, PartialBatchesLearnTheSameBitsEverywhere) {
  const auto run = [&](const std::vector<std::string>& overrides) {
    Engine engine(config(overrides), nullptr);
    engine.start();
    PartialRun result;
    const std::size_t whole = engine.blueprint().tokens_per_step();
    for (const std::size_t parts : {3U, 3U, 1U, 3U, 2U, 2U, 3U}) {
      auto tokens = ids(engine, static_cast<int>(parts));
      auto targets = ids(engine, 9);
      tokens.resize(whole / 3 * parts);
      targets.resize(whole / 3 * parts);
      const StepResult step = engine.train_step(tokens, targets, 0.01);
      result.numbers.insert(result.numbers.end(), {step.loss, step.grad_norm});
      if (parts == 2U) {
        result.numbers.push_back(engine.evaluate(ids(engine, 1), ids(engine, 2)));
      }
    }
    result.states = engine.state_hash();
    return result;
  };
  const PartialRun expected = run({"ballast.serial=true"});
  EXPECT_EQ(run({}), expected);
  EXPECT_EQ(run({kWeights + "nvme", kOptimizer + "nvme", "ballast.activations=nvme"}), expected);
  EXPECT_EQ(run({kWeights + "cpu", kOptimizer + "nvme", "ballast.order=micro_batch_major"}),
            expected);
}

TEST_F(EngineTest, APartialBatchIsTheMeanOverItsOwnTokens) {
  Engine whole(config({"gradient_accumulation_steps=1"}), nullptr);
  Engine part(config(), nullptr);
  whole.start();
  part.start();
  const auto tokens = ids(whole, 1);
  const auto targets = ids(whole, 2);
  const StepResult expected = whole.train_step(tokens, targets, 0.01);
  const StepResult result = part.train_step(tokens, targets, 0.01);
  EXPECT_EQ(result.loss, expected.loss);
  EXPECT_EQ(result.grad_norm, expected.grad_norm);
  EXPECT_EQ(part.state_hash(), whole.state_hash());
}

TEST_F(EngineTest, UpdatesWaitForTheNextStepAndAreDoneAtTheEnd) {
  Engine engine(config({kOptimizer + "nvme"}), nullptr);
  schedule::Timeline timeline;
  engine.record(&timeline);
  engine.start();
  engine.train_step(ids(engine, 1), ids(engine, 2), 0.1);
  engine.train_step(ids(engine, 1), ids(engine, 2), 0.1);
  engine.finish();
  const std::size_t blocks = engine.blueprint().model.blocks.size();
  std::vector<std::size_t> updates(4, 0);
  for (const schedule::Span& span : timeline.spans) {
    if (span.operation().action == schedule::Action::update_on_host) ++updates.at(span.run);
  }
  EXPECT_EQ(updates, (std::vector<std::size_t>{0, 0, blocks, blocks}));
}

TEST_F(EngineTest, AStepChangesTheStates) {
  Engine engine(config(), nullptr);
  engine.start();
  const std::uint64_t before = engine.state_hash();
  EXPECT_FALSE(engine.train_step(ids(engine, 1), ids(engine, 2), 0.1).skipped);
  EXPECT_EQ(engine.updates(), 1U);
  EXPECT_NE(engine.state_hash(), before);
}

TEST_F(EngineTest, EvaluatingChangesNothing) {
  Engine engine(config({kWeights + "nvme", kOptimizer + "nvme"}), nullptr);
  engine.start();
  const std::uint64_t before = engine.state_hash();
  const double first = engine.evaluate(ids(engine, 1), ids(engine, 2));
  EXPECT_EQ(engine.evaluate(ids(engine, 1), ids(engine, 2)), first);
  EXPECT_EQ(engine.state_hash(), before);
}

TEST_F(EngineTest, AnInterruptEndsAStepAndLeavesNoFile) {
  std::atomic<bool> interrupted = false;
  {
    Engine engine(config({kOptimizer + "nvme"}), &interrupted);
    engine.start();
    interrupted = true;
    EXPECT_THROW(engine.train_step(ids(engine, 1), ids(engine, 2), 0.1), Error);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST_F(EngineTest, ATokenBeyondTheVocabularyIsAnErrorNamingTheOperation) {
  Engine engine(config(), nullptr);
  engine.start();
  auto tokens = ids(engine, 1);
  tokens[5] = 131;
  try {
    engine.train_step(tokens, ids(engine, 2), 0.1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("forward of embedding, micro-batch 0"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ballast::engine
