#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/safetensors.h"
#include "ballast/model/compute.h"
#include "ballast/setup/setup.h"

#include "tests/e2e/first_step.h"
#include "tests/support/device_kind.h"
#include "tests/support/fixtures.h"
#include "tests/support/function_weights.h"
#include "tests/support/stored_values.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

// Small random models of all families, compared with transformers.
// tests/data/make_family_fixtures.py makes the fixtures.

namespace ballast::families_test {
namespace {

std::filesystem::path fixture(const std::string& name) {
  return test::fixture("families") / name;
}

json read_record(const std::string& family) {
  json record;
  std::ifstream(fixture(family + ".json")) >> record;
  return record;
}

config::Config make_config(const json& record, bool bf16, const std::filesystem::path& out,
                           bool packed = false) {
  const Batch batch(record, 0);
  const json& optimizer = record["optimizer"];
  const json text = {
      {"model", record["model"]},
      {"data", {{packed ? "documents" : "tokens", {"unused"}}, {"sequence_length", batch.length}}},
      {"optimizer", {{"type", "AdamW"}, {"params", optimizer}}},
      {"bf16", {{"enabled", bf16}}},
      {"gradient_clipping", 0},
      {"train_micro_batch_size_per_gpu", batch.sequences},
      {"zero_optimization",
       {{"offload_optimizer", {{"device", "cpu"}}}, {"offload_param", {{"device", "cpu"}}}}},
      {"ballast",
       {{"device", test::device_kind()},
        {"device_bytes", "128MiB"},
        {"host_bytes", "64MiB"},
        {"out", out.string()}}}};
  return config::parse(text.dump(), out, "families", {});
}

std::vector<float> read_logits(const formats::SafetensorsReader& from,
                               const std::string& name = "logits") {
  std::vector<float> logits(from.find(name)->elements);
  from.read(name, logits);
  return logits;
}

/// Number of steps that are compared. All of them use the same kernels.
std::size_t steps_of(const json& record) {
  const std::size_t all = record["loss"].size();
  return test::is_emulated() ? std::min<std::size_t>(all, 3) : all;
}

/// Bound of the relative error of a loss in fp32, in any of the steps. Some fixtures have gradients
/// that are almost zero; AdamW divides them by their size, so a rounding error moves their weights.
double bound_of_losses(const std::string& fixture) {
  constexpr double kUsual = 2e-6;
  constexpr double kWithSmallGradients = 2e-4;
  const bool small = fixture == "phi3" || fixture == "gpt_oss" || fixture.starts_with("gemma4");
  return small ? kWithSmallGradients : kUsual;
}

/// `from` must outlive the result.
test::FunctionWeights source_of(const formats::SafetensorsReader& from) {
  return {[&from](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
    const std::vector<float> values = test::read_tensor(from, tensor);
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
  }};
}

/// |ours - theirs| / |theirs|, L2 norm.
double relative_error(const std::vector<double>& ours, const std::vector<float>& theirs) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    error += (ours[i] - theirs[i]) * (ours[i] - theirs[i]);
    size += static_cast<double>(theirs[i]) * theirs[i];
  }
  return size == 0.0 ? std::sqrt(error) : std::sqrt(error / size);
}

/// Fixtures with widths that the CUDA device refuses.
bool is_for_host_only(const std::string& fixture) {
  static const std::set<std::string> names = {"gemma4_separate_values", "gemma4_layer_inputs",
                                              "ministral3", "deepseek_v3", "qwen3_5_moe"};
  return names.contains(fixture);
}

class Families : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (test::device_kind() == "cuda" && is_for_host_only(GetParam())) {
      GTEST_SKIP() << "the fixture is for the host device";
    }
  }
};

TAG_TESTS("emulated", "*Logits*");
TEST_P(Families, LogitsLossAndGradientsAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const formats::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const model::ModelConfig config = make_config(record, false, directory.path()).model;
  const FirstStep step(config, DType::f32, tensors, Batch(record, 0));
  const double loss = record["loss"][0];
  EXPECT_NEAR(step.loss(), loss, 2e-6 * loss);
  if (record.contains("aux_loss")) {
    const double balance = record["aux_loss"][0];
    EXPECT_NEAR(step.balance_loss(), balance, 2e-6 * balance);
  }
  EXPECT_LT(relative_error(step.logits(tensors), read_logits(tensors)), 1e-5);
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      if (tensor.buffer) continue;
      const std::vector<float> theirs = test::read_tensor(tensors, tensor, "gradient.");
      EXPECT_LT(relative_error(step.gradient(b, tensor), theirs), 1e-4) << tensor.name;
    }
  }
}

/// Name in a record of a tensor, or of the part of it that is in a block.
std::string name_in_record(const model::BlockSpec& block, const model::TensorSpec& tensor) {
  if (tensor.table) return fmt::format("{}[{}]", tensor.name, block.layer);
  return tensor.stored.stacked == 0 ? tensor.name
                                    : fmt::format("{}[{}]", tensor.name, block.expert);
}

/// Value of project() in the fixtures' program for a gradient in the order of memory.
double project(const std::vector<double>& gradient, const model::TensorSpec& tensor) {
  double sum = 0.0;
  for (Elems at = 0; at < gradient.size();) {
    const model::TensorRun run = model::run_in_files(tensor, at);
    for (Elems i = 0; i < run.count; ++i, ++at) {
      sum += gradient[at] * std::cos(0.7 * static_cast<double>(run.first + i) + 0.3);
    }
  }
  return sum;
}

TAG_TESTS("emulated", "*TwoDoc*/gemma3:*TwoDoc*/qwen3_next:*TwoDoc*/lfm2_biases");
TEST_P(Families, TwoDocumentsInASequenceAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const json& packed = record["packed"];
  const formats::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const config::Config config = make_config(record, false, directory.path(), true);
  const FirstStep step(config.model, DType::f32, tensors, Batch(record, 0, true));
  const double loss = packed["loss"][0];
  EXPECT_NEAR(step.loss(), loss, 2e-6 * loss);
  EXPECT_LT(relative_error(step.logits(tensors), read_logits(tensors, "packed.logits")), 1e-5);
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      if (tensor.buffer) continue;
      const std::vector<double> ours = step.gradient(b, tensor);
      const std::string name = name_in_record(step.blocks()[b], tensor);
      const double norm = packed["norm"][name];
      double squares = 0.0;
      for (const double value : ours) squares += value * value;
      EXPECT_NEAR(std::sqrt(squares), norm, 1e-4 * norm) << name;
      EXPECT_NEAR(project(ours, tensor), packed["projection"][name], 3e-4 * norm) << name;
    }
  }
  engine::Engine engine = setup::make_engine(config);
  test::start_from(engine, source_of(tensors));
  for (std::size_t i = 0; i < steps_of(packed); ++i) {
    const double expected = packed["loss"][i];
    const auto found = engine.train_step(Batch(record, i, true).view(), config.optimizer.lr);
    EXPECT_NEAR(found.loss, expected, bound_of_losses(GetParam()) * expected) << "step " << i;
  }
}

TAG_TESTS("emulated",
          "*Kept*/gemma3:*Kept*/gemma4:*Kept*/gemma4_shared_keys:*Kept*/gemma4_experts:*Kept*/"
          "gpt_neox:*Kept*/lfm2:*Kept*/qwen3_next");
TEST_P(Families, KeptIntermediatesGiveTheSameBits) {
  const json record = read_record(GetParam());
  const formats::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  for (const DType type : {DType::f32, DType::bf16}) {
    const model::ModelConfig config = make_config(record, false, directory.path()).model;
    const FirstStep recomputed(config, type, tensors, Batch(record, 0));
    for (const step::Kept keeps : {step::Kept::attention, step::Kept::all}) {
      const FirstStep kept(config, type, tensors, Batch(record, 0), keeps);
      EXPECT_EQ(kept.loss(), recomputed.loss());
      for (std::size_t b = 0; b < kept.blocks().size(); ++b) {
        for (const model::TensorSpec& tensor : kept.blocks()[b].tensors) {
          EXPECT_EQ(kept.gradient(b, tensor), recomputed.gradient(b, tensor)) << tensor.name;
        }
      }
    }
  }
}

/// The error of transformers in the gradient of tensor number `at` of block `b`. An expert may have
/// a single row, whose error is one draw, so for experts the largest error of the experts of its
/// layer is used.
double their_error(const json& errors, const std::vector<model::BlockSpec>& blocks, std::size_t b,
                   std::size_t at) {
  double error = errors.at(blocks[b].tensors[at].name);
  if (blocks[b].content != model::BlockContent::expert) return error;
  for (const model::BlockSpec& other : blocks) {
    if (other.content != model::BlockContent::expert || other.layer != blocks[b].layer) continue;
    error = std::max(error, errors.at(other.tensors[at].name).get<double>());
  }
  return error;
}

TAG_TESTS("emulated", "*Bf16Is*");
/// Bounds Ballast's error in bf16 by that of transformers: 1.5 times for each tensor, 1.1 times for
/// all together.
TEST_P(Families, Bf16IsAsCloseToFp32AsTransformersIs) {
  constexpr double kOfEach = 1.5;
  constexpr double kOfAll = 1.1;
  constexpr double kOneRounding = 0x1p-8;
  constexpr double kOfLoss = 5e-4;
  const json record = read_record(GetParam());
  const json& theirs = record["bf16"];
  const formats::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const model::ModelConfig config = make_config(record, true, directory.path()).model;
  const FirstStep step(config, DType::bf16, tensors, Batch(record, 0));
  const double loss = record["loss"][0];
  double largest = 0.0;
  for (const double one : theirs["loss"]) largest = std::max(largest, std::abs(one - loss));
  EXPECT_LE(std::abs(step.loss() - loss), kOfEach * largest + kOfLoss * loss);
  const std::vector<float> logits = read_logits(tensors);
  EXPECT_LE(relative_error(step.logits(tensors), logits),
            kOfEach * theirs["logits_error"].get<double>());
  double our_squares = 0.0;
  double their_squares = 0.0;
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (std::size_t at = 0; at < step.blocks()[b].tensors.size(); ++at) {
      const model::TensorSpec& tensor = step.blocks()[b].tensors[at];
      if (tensor.buffer) continue;
      const double ours =
          relative_error(step.gradient(b, tensor), test::read_tensor(tensors, tensor, "gradient."));
      const double bound = their_error(theirs["gradient_error"], step.blocks(), b, at);
      EXPECT_LE(ours, kOfEach * bound + kOneRounding) << tensor.name;
      our_squares += ours * ours;
      their_squares += bound * bound;
    }
  }
  EXPECT_LE(std::sqrt(our_squares), kOfAll * std::sqrt(their_squares));
}

/// Trains the model of a record from its first weights. `changes`: of the record's model section.
void expect_ten_steps(const std::string& name, bool bf16, const json& changes = json::object()) {
  json record = read_record(name);
  record["model"].update(changes);
  const formats::SafetensorsReader tensors(fixture(name + ".safetensors"));
  const test::TempDir directory;
  const config::Config config = make_config(record, bf16, directory.path());
  const double bound = bound_of_losses(name);
  engine::Engine engine = setup::make_engine(config);
  test::start_from(engine, source_of(tensors));
  for (std::size_t i = 0; i < steps_of(record); ++i) {
    const Batch batch(record, i);
    const auto found = engine.train_step(batch.view(), config.optimizer.lr);
    const double loss = record["loss"][i];
    EXPECT_NEAR(found.loss, loss, (bf16 ? 2e-2 : bound) * loss) << "step " << i;
    if (record.contains("aux_loss") && !bf16) {
      const double balance = record["aux_loss"][i];
      EXPECT_NEAR(found.balance_loss, balance, bound * balance) << "step " << i;
    }
  }
  engine.finish();
  if (bf16 || test::is_emulated()) return;
  for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
    for (const auto& tensor : engine.blueprint().model.blocks[b].tensors) {
      const std::vector<float> ours = engine.snapshot().read_weights(b, tensor);
      const std::vector<float> theirs = test::read_tensor(tensors, tensor, "final.");
      EXPECT_LT(relative_error({ours.begin(), ours.end()}, theirs), 1e-3) << tensor.name;
    }
  }
}

TAG_TESTS("emulated", "*Ten*/qwen3");
TEST_P(Families, TenStepsAreThoseOfTransformers) {
  for (const bool bf16 : {false, true}) expect_ten_steps(GetParam(), bf16);
}

class FamiliesInTiles : public Families {};

TEST_P(FamiliesInTiles, TenStepsAreThoseOfTransformers) {
  expect_ten_steps(GetParam(), false, {{"layer_tiles", 2}});
}

INSTANTIATE_TEST_SUITE_P(All, FamiliesInTiles,
                         testing::Values("ministral3", "seed_oss", "hunyuan_v1_dense", "ernie4_5",
                                         "qwen2", "qwen3", "phi3", "gpt_neox_sequential", "qwen3_5",
                                         "lfm2"),
                         [](const auto& family) { return std::string(family.param); });

INSTANTIATE_TEST_SUITE_P(
    All, Families,
    testing::Values("llama", "granite", "granite_swa", "granitemoe_swa", "granitemoehybrid",
                    "cohere2", "olmo_hybrid", "arcee", "seed_oss", "hunyuan_v1_dense", "ernie4_5",
                    "exaone4", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "olmo3",
                    "ministral3", "gemma2", "gemma3", "gemma4", "gemma4_separate_values",
                    "gemma4_experts", "gemma4_shared_keys", "gemma4_layer_inputs", "gpt_neox",
                    "gpt_neox_sequential", "deepseek_v3", "deepseek_v3_plain_queries",
                    "deepseek_v3_experts", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa",
                    "mistral4", "qwen3_5", "qwen3_5_moe", "qwen3_next", "mixtral", "mixtral_ties",
                    "mixtral_one", "qwen3_moe", "qwen3_moe_unnormalised", "qwen2_moe", "olmoe",
                    "gpt_oss", "gpt_oss_ties", "glm4_moe", "glm4_moe_ties", "minimax_m2",
                    "solar_open", "hy_v3", "afmoe", "cohere2_moe", "cohere2_moe_sigmoids",
                    "minimax_m3_vl_text", "mellum", "ernie4_5_moe", "lfm2", "lfm2_biases",
                    "muse_glimmer"),
    [](const auto& family) { return std::string(family.param); });

}  // namespace
}  // namespace ballast::families_test
