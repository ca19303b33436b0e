#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

#include "tests/support/tags.h"
#include "tests/unit/engine/tiny_engine.h"

// Work that a run omits for tensors that are not trained.

namespace ballast::engine::frozen_test {
namespace {

using FrozenBlocks = test::TinyEngine;
using plan::Action;
using plan::Kind;
using test::kOptimizer;
using test::kWeights;

const std::string kLastLayer = R"(ballast.train=["model.layers.2.*"])";
const std::string kParts =
    R"(ballast.train=["model.layers.1.self_attn.[qv]_proj.*", "model.layers.2.*", "model.norm.*"])";

TAG_TESTS("one_thread", "FrozenBlocks.*");
TEST_F(FrozenBlocks, HaveOnlyWeights) {
  const Engine engine = setup::make_engine(config({kLastLayer, kOptimizer + "cpu"}));
  const Blueprint& blueprint = engine.blueprint();
  std::set<std::string> with_states;
  for (const plan::Buffer& buffer : blueprint.schedule.buffers) {
    const bool shared = !buffer.name.starts_with("layer") &&
                        !buffer.name.starts_with("embedding") && !buffer.name.starts_with("head");
    if (shared || buffer.kind == Kind::weights || buffer.kind == Kind::intermediates) continue;
    with_states.insert(buffer.name.substr(0, buffer.name.find_last_of("0123456789") + 1));
  }
  EXPECT_EQ(with_states, std::set<std::string>{"layer 2"});
  EXPECT_EQ(blueprint.problem.name_of(blueprint.problem.program().first_differentiated), "layer 2");
  std::size_t backward = 0;
  for (const plan::Operation& op : blueprint.schedule.steady.operations) {
    backward += step::runs(op, model::Kernel::layer_backward) ? 1 : 0;
    const bool of_trained = op.action == Action::pack || op.action == Action::clear ||
                            op.action == Action::update ||
                            (op.action == Action::offload && op.payload == plan::Payload::gradient);
    if (!of_trained) continue;
    EXPECT_EQ(blueprint.problem.name_of(op.block), "layer 2");
  }
  EXPECT_EQ(backward, blueprint.micro_batches);
}

TEST_F(FrozenBlocks, DoNotChangeInTraining) {
  for (const char* place : {"none", "cpu", "nvme"}) {
    Engine engine = setup::make_engine(config({kParts, kWeights + place, kOptimizer + place}));
    Engine untrained = setup::make_engine(config({}));
    engine.start();
    untrained.start();
    for (int step = 0; step < 3; ++step) engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
    const auto& blocks = engine.blueprint().model.blocks;
    std::size_t trained = 0;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const model::TensorSpec& tensor : blocks[b].tensors) {
        const auto& other = untrained.blueprint().model.blocks[b].tensor(tensor.name);
        std::vector<float> before = untrained.snapshot().read_weights(b, other);
        // Frozen tensors have no remainder.
        if (tensor.frozen) {
          for (float& value : before) value = to_float(split_master(value).weight);
        }
        EXPECT_EQ(engine.snapshot().read_weights(b, tensor) == before, tensor.frozen)
            << tensor.name << place;
        trained += tensor.frozen ? 0 : 1;
      }
    }
    EXPECT_EQ(trained, 2U + 9U + 1U);
  }
}

TEST_F(FrozenBlocks, OnNvmeAreWrittenOnlyOnce) {
  const std::string placement = R"(ballast.placement=[{"blocks": 3, "weights": "device"}])";
  const auto written = [&](const std::string& train, int steps) {
    Engine engine = setup::make_engine(config({train, kWeights + "nvme", placement}));
    engine.start();
    for (int step = 0; step < steps; ++step) {
      engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
    }
    engine.finish();
    return engine.totals().nvme_bytes_written();
  };
  EXPECT_GT(written(kLastLayer, 0), 0U);
  EXPECT_EQ(written(kLastLayer, 3), written(kLastLayer, 0));
  EXPECT_GT(written("ballast.train=all", 3), written("ballast.train=all", 0));
}

/// For partly trained blocks, only what is trained is written, also with adapters and if
/// checkpoints keep earlier data. If only a part is trained and its states are in memory, nothing
/// is written.
TEST_F(FrozenBlocks, WriteOnlyWhatIsTrained) {
  const std::string adapters = R"(ballast.adapters={"targets": ["q_proj", "up_proj"], "rank": 4})";
  struct Case {
    std::vector<std::string> trained;
    std::string states;
  };
  for (const Case& c : {Case{{kParts}, "cpu"},
                        {{"ballast.train=adapters", adapters}, "cpu"},
                        {{"ballast.train=adapters", adapters}, "nvme"}}) {
    Bytes updated = 0;
    const auto written = [&](int steps) {
      std::vector<std::string> overrides = {kWeights + "nvme", kOptimizer + c.states,
                                            "ballast.checkpoint_every=2"};
      overrides.insert(overrides.end(), c.trained.begin(), c.trained.end());
      Engine engine = setup::make_engine(config(overrides));
      engine.start();
      for (int step = 0; step < steps; ++step) {
        engine.train_step({ids(engine, 1), ids(engine, 2)}, 0.1);
        if (step == 1) static_cast<void>(engine.snapshot().keep(2));
      }
      engine.finish();
      updated = 0;
      for (const step::BlockSizes& block : engine.blueprint().problem.blocks) {
        const bool to_nvme = c.states == "nvme";
        if (to_nvme) updated += block.state_bytes();
        if (to_nvme || block.gradient_bytes == block.weight_bytes) updated += block.gradient_bytes;
      }
      return engine.totals().nvme_bytes_written();
    };
    const Bytes before = written(0);
    for (const int steps : {1, 3}) {
      const Bytes now = written(steps);
      const auto number = static_cast<Bytes>(steps);
      EXPECT_EQ(now - before, number * updated) << c.trained.front() << c.states << steps;
    }
  }
}

TEST_F(FrozenBlocks, AreSplitInStageThreeUnlessTrainedInPart) {
  const config::Config config = this->config({kParts, "zero_optimization.stage=3"});
  const engine::RunInputs run = setup::translate(config);
  const model::KernelSizes kernels = model::kernel_memory(run.model, run.type, {2, 37}, "host", 1);
  const Blueprint blueprint =
      planner::draw_blueprint(run, {64 * kMiB, 64 * kMiB}, kernels, {.data = 4, .rank = 1});
  const step::RankSizes sizes(blueprint.problem);
  EXPECT_TRUE(sizes.shards_weights(1));   // frozen
  EXPECT_FALSE(sizes.shards_weights(2));  // trained in part
  EXPECT_TRUE(sizes.shards_weights(3));   // trained
  Bytes states = 0;
  for (const step::SubGroup& group : blueprint.problem.blocks[2].sub_groups) {
    states += group.state_bytes;
  }
  const Elems trained = blueprint.model.blocks[2].trained_elements();
  EXPECT_EQ(states, StateLayout(DType::bf16, {}, trained / 4).state_bytes);
}

}  // namespace
}  // namespace ballast::engine::frozen_test
