#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/setup/setup.h"

#include "src/checkpoint/writer.h"
#include "src/train/run_checkpoints.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Property: every run that `train` can run can be resumed, verified and exported.

namespace ballast::train::resumable_kinds_test {
namespace {

namespace fs = std::filesystem;
using Overrides = std::vector<std::string>;

const std::string kLlama =
    R"("family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)";
const std::string kTied =
    R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32, "num_layers": 1, "num_heads": 2)";
const std::string kMixtral =
    R"("family": "mixtral", "vocab_size": 131, "hidden_size": 32, "num_layers": 1, "num_heads": 2,
       "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 64)";
const std::string kSharedExpert =
    R"("family": "qwen2_moe", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
       "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
       "shared_expert_intermediate_size": 32, "intermediate_size": 64, "mlp_only_layers": [1])";
const std::string kGptOss =
    R"("family": "gpt_oss", "vocab_size": 131, "hidden_size": 64, "num_layers": 1, "num_heads": 2,
       "num_kv_heads": 1, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1,
       "intermediate_size": 64)";

const Overrides kAllOnNvme = {"zero_optimization.offload_optimizer.device=nvme",
                              "zero_optimization.offload_param.device=nvme",
                              "ballast.gradients=nvme"};
const Overrides kAllOnHost = {"zero_optimization.offload_optimizer.device=cpu",
                              "zero_optimization.offload_param.device=cpu"};
const Overrides kAdapters = {"ballast.train=adapters",
                             R"(ballast.adapters={"targets": "all-linear", "rank": 2})"};

const Overrides kFp16 = {"bf16.enabled=false", "fp16.enabled=true"};

Overrides operator+(Overrides one, const Overrides& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

/// A kind of run. All runs use `model` and `overrides`; resumed ones also `elsewhere`.
struct Kind {
  std::string name;
  std::string model;
  Overrides overrides = {};
  Overrides elsewhere = {};
};

std::vector<Kind> dense_kinds() {
  const Overrides nf4 = {"ballast.quantized_base=nf4"};
  const Overrides pairs = {R"(data={"pairs": ["unused.safetensors"], "sequence_length": 37})"};
  return {
      {"dense", kLlama, {}, kAllOnNvme},
      {"fp32 on the host", kLlama, kAllOnHost + Overrides{"bf16.enabled=false"}, kAllOnNvme},
      {"fp16 that skips a step", kLlama, kFp16 + kAllOnNvme, kAllOnHost},
      {"8-bit states in sub-groups", kLlama,
       kAllOnNvme +
           Overrides{"ballast.optimizer_states=8bit", "zero_optimization.sub_group_size=3000"}},
      {"bf16 first moments", kLlama, {"ballast.optimizer_states=bf16_first"}, kAllOnNvme},
      {"SGD without momentum", kLlama, {R"(optimizer={"type": "SGD", "params": {"lr": 0.1}})"}},
      {"Lion", kLlama, kAllOnHost + Overrides{R"(optimizer={"type": "Lion"})"}, kAllOnNvme},
      {"tied embeddings", kTied, kAllOnNvme},
      {"tiles", kLlama + R"(, "layer_tiles": 2, "vocabulary_tiles": 3, "tie_embeddings": true)",
       kAllOnNvme, kAllOnHost},
      {"speculative updates",
       kLlama,
       kAllOnNvme + Overrides{"ballast.speculative_updates=9"},
       {"ballast.speculative_updates=0"}},
      {"pattern", kLlama, kAllOnNvme + Overrides{R"(ballast.train=["model.layers.1.mlp.*"])"}},
      {"pattern over codes", kLlama, nf4 + Overrides{R"(ballast.train=["model.layers.1.mlp.*"])"},
       kAllOnNvme},
      {"one norm over codes", kLlama,
       Overrides{"ballast.quantized_base=int8", R"(ballast.train=["model.norm.weight"])"},
       kAllOnNvme},
      {"LoRA with dropout",
       kLlama,
       {"ballast.train=adapters",
        R"(ballast.adapters={"targets": "all-linear", "rank": 2, "dropout": 0.2})"},
       kAllOnNvme},
      {"DoRA over int8",
       kLlama,
       {"ballast.train=adapters", "ballast.quantized_base=int8",
        R"(ballast.adapters={"targets": "all-linear", "rank": 2, "dora": true})"},
       kAllOnNvme},
      {"QLoRA in fp16, 8-bit states", kLlama,
       kAdapters + nf4 + kAllOnNvme + kFp16 +
           Overrides{"ballast.double_quantization=true", "ballast.optimizer_states=8bit"},
       kAllOnHost},
      {"DPO over nf4", kLlama, kAdapters + nf4 + pairs, kAllOnNvme},
      {"documents", kLlama, {test::kPacked}, kAllOnNvme},
  };
}

std::vector<Kind> expert_kinds() {
  const Overrides nf4 = {"ballast.quantized_base=nf4"};
  const Overrides int8 = {"ballast.quantized_base=int8"};
  const Overrides active = {"ballast.expert_updates=active"};
  return {
      {"experts", kMixtral, active, kAllOnNvme},
      {"experts in nf4 with adapters", kMixtral, kAdapters + nf4, kAllOnNvme},
      {"experts in int8 with adapters on NVMe", kSharedExpert, kAdapters + int8 + kAllOnNvme,
       kAllOnHost},
      {"frozen experts in int8", kMixtral, int8 + Overrides{R"(ballast.train=["*self_attn*"])"},
       kAllOnNvme},
      {"one trained expert of experts in nf4", kMixtral,
       nf4 + kAllOnNvme + Overrides{R"(ballast.train=["*experts.1.*"])"}},
      {"frozen experts", kSharedExpert, kAllOnNvme + Overrides{R"(ballast.train=["*norm*"])"}},
      {"experts with losses of the step",
       kMixtral + R"(, "output_router_logits": true)",
       {"ballast.router_losses=step"},
       kAllOnNvme},
      {"DPO of experts over nf4", kMixtral,
       kAdapters + nf4 +
           Overrides{R"(data={"pairs": ["unused.safetensors"], "sequence_length": 37})"},
       kAllOnNvme},
      {"gpt-oss in nf4 with adapters", kGptOss, kAdapters + nf4 + kAllOnHost, kAllOnNvme},
  };
}

config::Config config_of(const Kind& kind, const fs::path& run, const Overrides& elsewhere = {}) {
  Overrides overrides = {"train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=2",
                         "ballast.checkpoint_every=1", "ballast.steps=3"};
  return test::tiny_config(kind.model, true, run, kind.overrides + overrides + elsewhere);
}

/// Step `number` of a run. Returns its loss.
double step(engine::Engine& engine, std::uint64_t number) {
  const engine::Blueprint& blueprint = engine.blueprint();
  test::Batch batch = test::scattered_ids(blueprint.problem.tokens_per_step(), number);
  if (blueprint.packed) {
    batch = test::with_documents(std::move(batch), blueprint.shape.length, number);
  }
  // The second step in fp16 is skipped.
  const double scale = blueprint.type == DType::f16 ? (number == 2 ? 1e38 : 1024.0) : 1.0;
  return engine.train_step(batch.view(), 0.01, scale).loss;
}

/// The states after the last step of a run.
struct Trained {
  double loss = 0.0;
  std::uint64_t hash = 0;
  bool operator==(const Trained&) const = default;
};

Trained last_step(engine::Engine& engine) {
  const double loss = step(engine, 3);
  return {loss, engine.snapshot().hash()};
}

/// The hash of a checkpoint, after verifying all of it.
std::uint64_t hash_of(const fs::path& folder) {
  const checkpoint::CheckpointReport report =
      checkpoint::examine_checkpoint(folder, {.whole = true, .hash = true}, [](Bytes, Bytes) {});
  EXPECT_EQ(report.damage, "");
  return report.hash.value_or(0);
}

Trained resumed(const config::Config& config, const fs::path& from) {
  engine::Engine engine = setup::make_engine(config);
  resume_run(engine, config, from, nullptr);
  return last_step(engine);
}

/// Trains three steps without a stop, and the last one after a resume in the same run directory and
/// from exported states, elsewhere.
void expect_resumes(const Kind& kind) {
  SCOPED_TRACE(kind.name);
  const test::TempDir directory;
  const fs::path run = directory.path() / "run";
  const fs::path states = directory.path() / "states";
  const config::Config config = config_of(kind, run);
  Trained expected;
  for (const char* out : {"run", "next"}) fs::create_directories(directory.path() / out);
  {
    engine::Engine engine = setup::make_engine(config);
    engine.start();
    step(engine, 1);
    step(engine, 2);
    const checkpoint::CheckpointFacts facts = {.step = 2,
                                               .updates = engine.updates(),
                                               .batch = config.batch.train_batch,
                                               .length = config.data.sequence_length};
    const fs::path folder = checkpoint::CheckpointWriter(engine, run, facts, 2, nullptr).publish();
    EXPECT_EQ(hash_of(folder), engine.snapshot().hash());
    checkpoint::export_states(run, states, [](Bytes, Bytes) {});
    EXPECT_EQ(hash_of(states), engine.snapshot().hash());
    expected = last_step(engine);
  }
  EXPECT_EQ(resumed(config, run), expected);
  EXPECT_EQ(resumed(config_of(kind, directory.path() / "next", kind.elsewhere), states), expected);
}

TEST(ResumableKinds, DenseModelsResumeWithTheSameBits) {
  for (const Kind& kind : dense_kinds()) expect_resumes(kind);
}

TEST(ResumableKinds, ModelsWithExpertsResumeWithTheSameBits) {
  for (const Kind& kind : expert_kinds()) expect_resumes(kind);
}

}  // namespace
}  // namespace ballast::train::resumable_kinds_test
