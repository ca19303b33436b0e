#include "ballast/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/setup/setup.h"

#include "tests/support/documents.h"
#include "tests/support/expect_error.h"
#include "tests/support/function_weights.h"
#include "tests/unit/engine/tiny_engine.h"

namespace ballast::engine::engine_test {
namespace {

using EngineTest = test::TinyEngine;
using test::kOptimizer;
using test::kWeights;

TEST_F(EngineTest, RunsFromAModelAndBudgetsWithoutAnyConfig) {
  model::ModelConfig llama;
  llama.family = "llama";
  llama.vocab_size = 131;
  llama.hidden_size = 64;
  llama.num_layers = 3;
  llama.num_heads = 4;
  llama.intermediate_size = 96;
  llama.max_sequence = 37;
  const auto losses = [&](Tier tier) {
    Blueprint blueprint = {.model = model::build_architecture(llama),
                           .type = DType::f32,
                           .shape = {2, 37},
                           .micro_batches = 3,
                           .budgets = {64 * kMiB, 64 * kMiB}};
    size_problem(blueprint,
                 model::kernel_memory(blueprint.model, blueprint.type, blueprint.shape, "host", 1));
    place(blueprint,
          {std::vector<step::BlockPlacement>(blueprint.model.blocks.size(), {tier, tier, tier})});
    EngineOptions options = {.device = "host", .compute_threads = 1};
    options.swap = {.paths = {{.directory = directory.path()}}, .any_file_system = true};
    Engine engine(std::move(blueprint), options);
    engine.start();
    std::vector<double> found;
    for (int step = 0; step < 4; ++step) {
      found.push_back(engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.01).loss);
    }
    return found;
  };
  const std::vector<double> on_device = losses(Tier::device);
  EXPECT_LT(on_device.back(), on_device.front());
  EXPECT_EQ(losses(Tier::host), on_device);
  EXPECT_EQ(losses(Tier::nvme), on_device);
}

TEST_F(EngineTest, ABlueprintOfOtherRanksIsRefused) {
  Blueprint blueprint = setup::draw_blueprint(config());
  blueprint.problem.sharers = blueprint.mesh.data = 2;
  EXPECT_THROW(Engine(std::move(blueprint), {.device = "host"}), Error);
}

TEST_F(EngineTest, WhatIsAllocatedIsWhatTheLedgerSays) {
  for (const char* tier : {"none", "cpu", "nvme"}) {
    Engine engine = setup::make_engine(config({kWeights + tier, kOptimizer + tier}));
    engine.start();
    const auto totals = engine.totals();
    for (const Tier t : kTiers) {
      EXPECT_EQ(totals.allocated[static_cast<std::size_t>(t)], engine.blueprint().ledger.total(t))
          << tier << ", " << to_string(t);
    }
  }
}

TEST_F(EngineTest, TwoDevicesTrainAModelThatDoesNotFitOne) {
  const auto with_stages = [&](int stages) {
    return config({kWeights + "none", kOptimizer + "none", "ballast.device_bytes=24MiB",
                   "ballast.order=layer_major", fmt::format("pipeline.stages={}", stages),
                   R"(model={"family": "llama", "vocab_size": 131, "hidden_size": 192,
                             "num_layers": 6, "num_heads": 6, "intermediate_size": 512})"});
  };
  test::expect_error(ErrorCategory::memory, {"device"},
                     [&] { setup::make_engine(with_stages(1)); });
  Engine engine = setup::make_engine(with_stages(2));
  engine.start();
  const std::vector<Bytes> allocated = engine.totals().allocated_on_device;
  ASSERT_EQ(allocated.size(), 2U);
  for (std::uint8_t d = 0; d < 2; ++d) {
    EXPECT_EQ(allocated[d], engine.blueprint().ledger.device_total(d));
    EXPECT_GT(allocated[d], 12 * kMiB);
    EXPECT_LE(allocated[d], 24 * kMiB);
  }
  const double first = engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.003).loss;
  EXPECT_LT(engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.003).loss, first);
}

TEST_F(EngineTest, TheLedgerOfEveryStateFormatIsWhatIsAllocated) {
  for (const char* optimizer : {"AdamW", "Adagrad", "Lion", "SGD"}) {
    for (const char* states : {"fp32", "8bit"}) {
      Engine engine = setup::make_engine(
          config({kOptimizer + "nvme", std::string("ballast.optimizer_states=") + states,
                  R"(optimizer={"type": ")" + std::string(optimizer) + "\"}"}),
          nullptr);
      engine.start();
      Bytes sum = 0;
      for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
        sum += state_layout(engine.blueprint(), b, 0).state_bytes;
      }
      const auto nvme = static_cast<std::size_t>(Tier::nvme);
      EXPECT_EQ(engine.totals().allocated[nvme], sum) << optimizer << ", " << states;
      EXPECT_EQ(engine.blueprint().ledger.total(Tier::nvme), sum) << optimizer << ", " << states;
    }
  }
}

TEST_F(EngineTest, ANumaNodeThatIsNotThereIsAConfigError) {
  try {
    const Engine engine = setup::make_engine(config({"ballast.update_numa_node=1000"}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
  }
}

TEST_F(EngineTest, InitialStatesDoNotDependOnPlacementThreadsOrBuffers) {
  std::vector<std::uint64_t> hashes;
  for (const std::string tier : {"none", "cpu", "nvme"}) {
    for (const std::string threads : {"1", "3"}) {
      // With one buffer, blocks of all sizes use the same memory in turn.
      for (const std::string count : {"1", "3"}) {
        Engine engine = setup::make_engine(
            config({"model.hidden_size=192", "model.num_layers=2", kWeights + tier,
                    kOptimizer + tier, "ballast.update_threads=" + threads,
                    "zero_optimization.offload_param.buffer_count=" + count,
                    "zero_optimization.offload_optimizer.buffer_count=" + count}));
        engine.start();
        hashes.push_back(engine.snapshot().hash());
      }
    }
  }
  EXPECT_EQ(hashes, std::vector<std::uint64_t>(hashes.size(), hashes.front()));
}

TEST_F(EngineTest, InitialWeightsOfASourceArriveInPartsWhereTheyBelong) {
  Engine engine = setup::make_engine(
      config({kWeights + "nvme", kOptimizer + "cpu", "ballast.update_threads=3"}));
  expect_all_of_a_source(engine);
}

/// Whether `tensor` is stored as bf16: all tensors of a layer except one.
bool is_stored_as_bf16(const model::TensorSpec& tensor) {
  return !tensor.name.ends_with("q_proj.weight");
}

/// Values that bf16 can represent, and one tensor with others.
float stored_value(const model::TensorSpec& tensor, Elems i) {
  const auto value = 1.0F / static_cast<float>(tensor.size + i);
  return is_stored_as_bf16(tensor) ? to_float(from_float<Bf16>(value)) : value;
}

TEST_F(EngineTest, Bf16WeightsAreReadOnceAndHaveNoRemainders) {
  for (const char* tier : {"nvme", "cpu", "none"}) {
    std::map<std::string, Elems> elements_read;
    std::mutex mutex;
    const auto read = [&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
      for (Elems i = 0; i < out.size(); ++i) out[i] = stored_value(tensor, first + i);
      const std::lock_guard lock(mutex);
      elements_read[tensor.name] += out.size();
    };
    const auto read_bf16 = [&](const model::TensorSpec& tensor, Elems first, HostBytes out) {
      const Elems count = out.size() / sizeof(Bf16);
      for (Elems i = 0; i < count; ++i) {
        const Bf16 value = from_float<Bf16>(stored_value(tensor, first + i));
        std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
      }
      const std::lock_guard lock(mutex);
      elements_read[tensor.name] += count;
    };
    Engine engine = setup::make_engine(config({kWeights + tier, kOptimizer + tier}));
    test::start_from(engine, {read, is_stored_as_bf16, read_bf16});
    const auto& blocks = engine.blueprint().model.blocks;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const model::TensorSpec& tensor : blocks[b].tensors) {
        std::vector<float> expected(tensor.size);
        for (Elems i = 0; i < expected.size(); ++i) expected[i] = stored_value(tensor, i);
        EXPECT_EQ(engine.snapshot().read_weights(b, tensor), expected)
            << tier << ": " << tensor.name;
        EXPECT_EQ(elements_read[tensor.name], (is_stored_as_bf16(tensor) ? 1 : 2) * tensor.size);
      }
    }
  }
}

/// Any pattern of bits, NaNs of all kinds included; those of one tensor need all 32 bits.
std::uint32_t any_bits(const model::TensorSpec& tensor, Elems i) {
  const auto bits = static_cast<std::uint32_t>((tensor.offset + i) * 2654435761U);
  return is_stored_as_bf16(tensor) ? bits & 0xffff0000U : bits;
}

TEST_F(EngineTest, StoredBf16WeightsBecomeTheStatesOfTheirValues) {
  const auto read = [](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
    for (Elems i = 0; i < out.size(); ++i) {
      out[i] = std::bit_cast<float>(any_bits(tensor, first + i));
    }
  };
  const auto read_bf16 = [](const model::TensorSpec& tensor, Elems first, HostBytes out) {
    for (Elems i = 0; i < out.size() / sizeof(Bf16); ++i) {
      const auto value = static_cast<std::uint16_t>(any_bits(tensor, first + i) >> 16U);
      std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
    }
  };
  const auto hash = [&](const test::FunctionWeights& source, const std::string& tier,
                        const std::string& threads, const std::string& buffers) {
    Engine engine =
        setup::make_engine(config({"model.hidden_size=192", "model.num_layers=2", kWeights + tier,
                                   kOptimizer + tier, "ballast.update_threads=" + threads,
                                   "zero_optimization.offload_param.buffer_count=" + buffers,
                                   "zero_optimization.offload_optimizer.buffer_count=" + buffers}));
    test::start_from(engine, source);
    return engine.snapshot().hash();
  };
  const std::uint64_t expected = hash({read}, "none", "1", "1");
  for (const std::string tier : {"none", "cpu", "nvme"}) {
    for (const std::string threads : {"1", "3"}) {
      // With one buffer, blocks of all sizes use the same memory in turn.
      for (const std::string buffers : {"1", "3"}) {
        SCOPED_TRACE(tier + ", " + threads + " threads, " + buffers + " buffers");
        EXPECT_EQ(hash({read}, tier, threads, buffers), expected);
        EXPECT_EQ(hash({read, is_stored_as_bf16, read_bf16}, tier, threads, buffers), expected);
      }
    }
  }
}

TEST_F(EngineTest, ASourceThatFailsEndsTheStartWithItsError) {
  Engine engine = setup::make_engine(config({"ballast.update_threads=3"}));
  try {
    test::start_from(engine, {[](const model::TensorSpec&, Elems, std::span<float>) {
                       throw Error(ErrorCategory::data, "no such tensor");
                     }});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no such tensor"), std::string::npos) << error.what();
  }
}

TEST_F(EngineTest, ANonFiniteGradientLeavesEveryStateAsItWas) {
  Engine engine = setup::make_engine(config({kOptimizer + "nvme"}));
  test::start_from(engine, {[](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
                     std::fill(out.begin(), out.end(), 0.01F);
                     if (first == 0 && tensor.name.ends_with("up_proj.weight")) {
                       out[0] = std::numeric_limits<float>::infinity();
                     }
                   }});
  const std::uint64_t before = engine.snapshot().hash();
  const StepResult result = engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(engine.updates(), 0U);
  EXPECT_EQ(engine.snapshot().hash(), before);
}

TEST_F(EngineTest, AnEagerUpdateRefusesANonFiniteGradientByName) {
  Engine engine = setup::make_engine(config({"ballast.update=eager", "gradient_clipping=0"}));
  test::start_from(engine, {[](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
                     std::fill(out.begin(), out.end(), 0.01F);
                     if (first == 0 && tensor.name.ends_with("up_proj.weight")) {
                       out[0] = std::numeric_limits<float>::infinity();
                     }
                   }});
  try {
    engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
    engine.finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::numeric);
    const std::string message = error.what();
    EXPECT_NE(message.find("update on the device of "), std::string::npos) << message;
    EXPECT_NE(message.find("ballast.update to \"gated\""), std::string::npos) << message;
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
    Engine engine = setup::make_engine(config(overrides));
    engine.start();
    PartialRun result;
    const std::size_t whole = engine.blueprint().tokens_per_step();
    for (const std::size_t parts : {3U, 3U, 1U, 3U, 2U, 2U, 3U}) {
      auto tokens = ids(engine, static_cast<int>(parts));
      auto targets = ids(engine, 9);
      tokens.resize(whole / 3 * parts);
      targets.resize(whole / 3 * parts);
      const StepResult step = engine.train_step({tokens, targets}, 0.01);
      result.numbers.insert(result.numbers.end(), {step.loss, step.grad_norm});
      if (parts == 2U) {
        result.numbers.push_back(engine.evaluate({ids(engine, 1), ids(engine, 2)}).loss);
      }
    }
    result.states = engine.snapshot().hash();
    return result;
  };
  const PartialRun expected = run({"ballast.serial=true"});
  EXPECT_EQ(run({}), expected);
  EXPECT_EQ(run({kWeights + "nvme", kOptimizer + "nvme", "ballast.activations=nvme"}), expected);
  EXPECT_EQ(run({kWeights + "cpu", kOptimizer + "nvme", "ballast.order=micro_batch_major"}),
            expected);
}

TEST_F(EngineTest, APartialBatchIsTheMeanOverItsOwnTokens) {
  Engine whole = setup::make_engine(config({"gradient_accumulation_steps=1"}));
  Engine part = setup::make_engine(config());
  whole.start();
  part.start();
  const auto tokens = ids(whole, 1);
  const auto targets = ids(whole, 2);
  const StepResult expected = whole.train_step({tokens, targets}, 0.01);
  const StepResult result = part.train_step({tokens, targets}, 0.01);
  EXPECT_EQ(result.loss, expected.loss);
  EXPECT_EQ(result.grad_norm, expected.grad_norm);
  EXPECT_EQ(part.snapshot().hash(), whole.snapshot().hash());
}

TEST_F(EngineTest, UpdatesWaitForTheNextStepAndAreDoneAtTheEnd) {
  Engine engine = setup::make_engine(config({kOptimizer + "nvme"}));
  plan::Timeline timeline;
  engine.record(&timeline);
  engine.start();
  engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
  engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
  engine.finish();
  const std::size_t blocks = engine.blueprint().model.blocks.size();
  std::vector<std::size_t> updates(4, 0);
  for (const plan::Span& span : timeline.spans) {
    if (span.operation().action == plan::Action::update) ++updates.at(span.run);
  }
  EXPECT_EQ(updates, (std::vector<std::size_t>{0, 0, blocks, blocks}));
}

TEST_F(EngineTest, AStepChangesTheStates) {
  Engine engine = setup::make_engine(config());
  engine.start();
  const std::uint64_t before = engine.snapshot().hash();
  EXPECT_FALSE(engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1).skipped);
  EXPECT_EQ(engine.updates(), 1U);
  EXPECT_NE(engine.snapshot().hash(), before);
}

TEST_F(EngineTest, EvaluatingChangesNothing) {
  Engine engine = setup::make_engine(config({kWeights + "nvme", kOptimizer + "nvme"}));
  engine.start();
  const std::uint64_t before = engine.snapshot().hash();
  const double first = engine.evaluate({ids(engine, 1), ids(engine, 2)}).loss;
  EXPECT_EQ(engine.evaluate({ids(engine, 1), ids(engine, 2)}).loss, first);
  EXPECT_EQ(engine.snapshot().hash(), before);
}

TEST_F(EngineTest, LossesAreMeansOverCountedTargets) {
  Engine engine = setup::make_engine(config({"ballast.eval_batches=3"}));
  engine.start();
  const auto tokens = ids(engine, 1);
  const auto all = ids(engine, 2);
  // One target in five, all in the last micro-batches.
  auto few = all;
  auto others = all;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool is_few = i > all.size() / 2 && i % 5 == 0;
    (is_few ? others : few)[i] = is_few ? -1 : -100;
  }
  const auto sum = [](const Evaluation& found) {
    return found.loss * static_cast<double>(found.targets);
  };
  const Evaluation whole = engine.evaluate({tokens, all});
  const Evaluation part = engine.evaluate({tokens, few});
  const Evaluation rest = engine.evaluate({tokens, others});
  EXPECT_EQ(whole.targets, all.size());
  EXPECT_EQ(part.targets + rest.targets, all.size());
  EXPECT_NEAR(sum(part) + sum(rest), sum(whole), 1e-9 * sum(whole));
  EXPECT_GT(std::abs(part.loss - whole.loss), 1e-4);
  const StepResult step = engine.train_step({tokens, few}, 0.1);
  EXPECT_EQ(step.targets, part.targets);
  EXPECT_EQ(step.loss, part.loss);
  const std::vector<std::int32_t> none(all.size(), -1);
  EXPECT_EQ(engine.evaluate({tokens, none}).loss, 0.0);
  EXPECT_EQ(engine.train_step({tokens, none}, 0.1).grad_norm, 0.0);
}

TEST_F(EngineTest, RefusesPositionsThatAreNotThoseOfDocuments) {
  Engine engine = setup::make_engine(config({test::kPacked}));
  engine.start();
  const auto tokens = ids(engine, 1);
  auto positions = test::packed_positions(tokens.size() / 37, 37);
  EXPECT_THROW(engine.train_step({tokens, tokens}, 0.1), Error) << "no positions";
  const auto refusal = [&](std::size_t at, std::int32_t value) {
    auto bad = positions;
    bad[at] = value;
    try {
      engine.train_step({tokens, tokens, bad}, 0.1);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  for (const auto& [at, value] : {std::pair{0, 1}, {37, 1}, {5, -1}, {5, 1000000}, {74, 37}}) {
    EXPECT_NE(refusal(static_cast<std::size_t>(at), value).find(fmt::format("token {} of", at)),
              std::string::npos)
        << at;
  }
  EXPECT_FALSE(engine.train_step({tokens, tokens, positions}, 0.1).skipped);
}

TEST_F(EngineTest, AnInterruptEndsAStepAndLeavesNoFile) {
  std::atomic<bool> interrupted = false;
  {
    Engine engine = setup::make_engine(config({kOptimizer + "nvme"}), &interrupted);
    engine.start();
    interrupted = true;
    EXPECT_THROW(engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1), Error);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST_F(EngineTest, ATokenBeyondTheVocabularyIsAnErrorNamingTheOperation) {
  Engine engine = setup::make_engine(config());
  engine.start();
  auto tokens = ids(engine, 1);
  tokens[5] = 131;
  try {
    engine.train_step({tokens, ids(engine, 2)}, 0.1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("forward of embedding, micro-batch 0"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ballast::engine::engine_test
