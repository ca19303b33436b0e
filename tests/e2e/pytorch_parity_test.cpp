#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/data/loader.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/weight_files.h"
#include "ballast/setup/setup.h"

#include "src/data/training_data.h"
#include "src/train/initial_weights.h"
#include "src/train/step_rules.h"
#include "tests/support/device_kind.h"
#include "tests/support/fixtures.h"
#include "tests/support/stored_values.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

// Thirty optimizer steps, compared with the same steps in PyTorch: warm-up, weight decay, clipping
// that is active in some steps, three micro-batches of accumulation.
// tests/data/make_training_fixtures.py has the PyTorch program.

namespace ballast::pytorch_parity_test {
namespace {

using nlohmann::json;

std::filesystem::path fixture(const std::string& name) {
  return test::fixture("training") / name;
}

json make_config(const json& reference, DType type) {
  const json& batch = reference["batch"];
  return {{"model", reference["model"]},
          {"data",
           {{"tokens", {fixture("tokens.u16.bin").string()}},
            {"sequence_length", batch["sequence_length"]},
            {"held_out", 0},
            {"shuffle", false}}},
          {"optimizer",
           {{"type", "AdamW"},
            {"params",
             {{"lr", reference["optimizer"]["lr"]},
              {"betas", reference["optimizer"]["betas"]},
              {"eps", reference["optimizer"]["eps"]},
              {"weight_decay", reference["optimizer"]["weight_decay"]}}}}},
          {"scheduler",
           {{"type", reference["scheduler"]["type"]},
            {"params",
             {{"warmup_min_lr", reference["scheduler"]["warmup_min_lr"]},
              {"warmup_max_lr", reference["scheduler"]["warmup_max_lr"]},
              {"warmup_num_steps", reference["scheduler"]["warmup_num_steps"]},
              {"warmup_type", reference["scheduler"]["warmup_type"]}}}}},
          {"bf16", {{"enabled", type == DType::bf16}}},
          // Settings of the fixture's scaler.
          {"fp16",
           {{"enabled", type == DType::f16},
            {"initial_scale_power", 20},
            {"loss_scale_window", 6},
            {"hysteresis", 1}}},
          {"gradient_clipping", reference["gradient_clipping"]},
          {"train_micro_batch_size_per_gpu", batch["sequences"]},
          {"gradient_accumulation_steps", batch["micro_batches"]},
          {"zero_optimization",
           {{"offload_optimizer", {{"device", "nvme"}}}, {"offload_param", {{"device", "cpu"}}}}},
          {"aio", {{"any_file_system", true}}},
          {"ballast",
           {{"device", test::device_kind()}, {"device_bytes", "128MiB"}, {"host_bytes", "64MiB"}}}};
}

/// A run of Ballast and the reference's numbers.
struct Comparison {
  json reference;
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<double> rates;
  std::vector<double> scales;  ///< loss scale per step
  std::vector<bool> skipped;
  /// Per tensor, the relative L2 error of the whole update, |(ours - initial) - (theirs - initial)|
  /// /
  /// |theirs - initial|; for frozen tensors the largest difference from the initial values.
  std::vector<std::pair<std::string, double>> update_errors;
  std::vector<std::pair<std::string, double>> frozen_errors;
};

double square_sum(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return sum;
}

using Values = std::map<std::string, std::vector<float>>;

/// Name of the tensor, or of the part of it that is in a block.
std::string name_of(const model::TensorSpec& tensor) {
  const Elems first = tensor.first_element();
  return first == 0 ? tensor.name : fmt::format("{}[{}]", tensor.name, first);
}

/// The weights before the first step, by name_of().
Values initial_values(engine::Engine& engine) {
  Values values;
  const auto& blocks = engine.blueprint().model.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (const auto& tensor : blocks[b].tensors) {
      values[name_of(tensor)] = engine.snapshot().read_weights(b, tensor);
    }
  }
  return values;
}

void compare_updates(engine::Engine& engine, const Values& initial, const std::string& name,
                     Comparison& comparison) {
  const formats::SafetensorsReader final_weights(fixture(name + ".final.safetensors"));
  const formats::WeightFiles stacks(fixture(name + ".final.safetensors"));
  const auto& blocks = engine.blueprint().model.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (const auto& tensor : blocks[b].tensors) {
      const std::vector<float> ours = engine.snapshot().read_weights(b, tensor);
      const std::vector<float>& start = initial.at(name_of(tensor));
      if (tensor.frozen) {
        double largest = 0.0;
        for (std::size_t i = 0; i < ours.size(); ++i) {
          largest = std::max(largest, static_cast<double>(std::abs(ours[i] - start[i])));
        }
        comparison.frozen_errors.emplace_back(tensor.name, largest);
        continue;
      }
      const bool adapter = !tensor.name_in_files.empty();
      std::vector<float> theirs(tensor.size);
      if (adapter || final_weights.find(tensor.name) != nullptr) {
        theirs = test::read_tensor(final_weights, tensor);
      } else {
        stacks.read(tensor.name, theirs);  // an expert's map in a tensor of all experts
      }
      std::vector<double> error;
      std::vector<double> update;
      for (std::size_t i = 0; i < ours.size(); ++i) {
        error.push_back(static_cast<double>(ours[i]) - theirs[i]);
        update.push_back(static_cast<double>(theirs[i]) - start[i]);
      }
      comparison.update_errors.emplace_back(tensor.name,
                                            std::sqrt(square_sum(error) / square_sum(update)));
    }
  }
}

/// `changes`: of the record's model section.
Comparison run(const std::string& name, DType type, const json& changes = json::object()) {
  Comparison comparison;
  std::ifstream(fixture(name + ".json")) >> comparison.reference;
  const test::TempDir directory;
  json text = make_config(comparison.reference, type);
  text["ballast"]["out"] = directory.path().string();
  if (comparison.reference.contains("train"))
    text["ballast"]["train"] = comparison.reference["train"];
  const std::string start = comparison.reference.value("initial", name);
  const std::filesystem::path initial = fixture(start + ".initial.safetensors");
  text["model"]["weights"] = initial.string();
  text["model"].update(changes);
  if (comparison.reference.contains("adapters")) {
    text["ballast"]["train"] = "adapters";
    text["ballast"]["adapters"]["path"] = fixture(name).string();
  }
  const config::Config config = config::parse(text.dump(), directory.path(), name, {});

  engine::Engine engine = setup::make_engine(config);
  train::check_initial_weights(config);
  train::start_from_weights(engine, config, [](Bytes, Bytes) {});
  const auto before = initial_values(engine);
  const auto source = std::make_shared<const data::TokenSource>(
      data::TokenSource::open(config.data, config.model.vocab_size));
  const std::uint64_t length = config.data.sequence_length;
  const data::Loader loader(data::windows_of(source, {0, source->size()}, length, false, 0),
                            nullptr,
                            {.micro_batches = config.batch.accumulation,
                             .sequences = config.batch.micro_batch,
                             .length = length});
  const train::LrSchedule rates(config.scheduler, config.optimizer.lr);
  train::LossScaler loss_scaler(config);
  const bool on_cuda = test::device_kind() == "cuda";
  const bool few = test::is_emulated() || (on_cuda && comparison.reference.contains("adapters"));
  const std::uint64_t steps = few ? 3 : comparison.reference["batch"]["steps"].get<std::uint64_t>();
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const data::Batch batch = loader.batch(step);
    comparison.rates.push_back(rates.at(engine.updates() + 1));
    comparison.scales.push_back(loss_scaler.scale());
    const auto result = engine.train_step({batch.tokens, batch.targets}, comparison.rates.back(),
                                          loss_scaler.scale());
    loss_scaler.after_step(step, result.skipped);
    comparison.skipped.push_back(result.skipped);
    comparison.losses.push_back(result.loss);
    comparison.norms.push_back(result.grad_norm);
  }
  engine.finish();
  if (type != DType::f16 && !few) compare_updates(engine, before, name, comparison);
  return comparison;
}

double relative(double ours, double theirs) {
  return std::abs(ours - theirs) / std::abs(theirs);
}

/// Biases of keys have a gradient of zero in exact arithmetic (softmax does not depend on a
/// constant), so their values are rounding noise. GPT-2's are a third of the fused bias.
bool is_noise(const std::string& tensor) {
  return tensor.ends_with("attn.c_attn.bias") || tensor.ends_with("k_proj.bias");
}

void expect_fp32_parity(const std::string& name, const json& changes = json::object()) {
  const Comparison comparison = run(name, DType::f32, changes);
  const json& reference = comparison.reference["runs"]["fp32"];
  for (std::size_t i = 0; i < comparison.losses.size(); ++i) {
    EXPECT_DOUBLE_EQ(comparison.rates[i], comparison.reference["lr"][i].get<double>());
    // Only the order of sums differs: 1e-7 in losses, 3e-7 in norms.
    EXPECT_LT(relative(comparison.losses[i], reference["loss"][i]), 2e-6) << "step " << i + 1;
    EXPECT_LT(relative(comparison.norms[i], reference["grad_norm"][i]), 1e-5) << "step " << i + 1;
  }
  for (const auto& [tensor, error] : comparison.update_errors) {
    EXPECT_LT(is_noise(tensor) ? 0.0 : error, 1e-3) << tensor;
  }
  if (!comparison.update_errors.empty()) {
    const bool all = !comparison.reference.contains("train");
    EXPECT_EQ(comparison.frozen_errors.empty(), all && !comparison.reference.contains("adapters"));
  }
  for (const auto& [tensor, error] : comparison.frozen_errors) EXPECT_EQ(error, 0.0) << tensor;
}

void expect_bf16_parity(const std::string& name) {
  const Comparison comparison = run(name, DType::bf16);
  const json& reference = comparison.reference["runs"]["bf16"];
  for (std::size_t i = 0; i < comparison.losses.size(); ++i) {
    EXPECT_LT(relative(comparison.losses[i], reference["loss"][i]), 1e-2) << "step " << i + 1;
  }
}

/// Includes the skipped steps, and the scale after them.
TEST(PytorchParity, TiedLlamaInFp16) {
  const Comparison comparison = run("llama_tied_fp16", DType::f16);
  const json& reference = comparison.reference["runs"]["fp16"];
  EXPECT_EQ(json(comparison.skipped), reference["skipped"]);
  EXPECT_EQ(json(comparison.scales), reference["scale"]);
  EXPECT_GE(std::count(comparison.skipped.begin(), comparison.skipped.end(), true), 4);
  for (std::size_t i = 0; i < comparison.losses.size(); ++i) {
    EXPECT_LT(relative(comparison.losses[i], reference["loss"][i]), 2e-3) << "step " << i + 1;
    if (comparison.skipped[i]) continue;
    EXPECT_LT(relative(comparison.norms[i], reference["grad_norm"][i]), 1e-2) << "step " << i + 1;
  }
}

/// Ten steps on pairs from the weights in `initial` and the adapters of `folder`. `overrides`: of
/// the config. Returns the last loss.
double expect_preferences(const std::filesystem::path& folder, const std::filesystem::path& initial,
                          const std::vector<std::string>& overrides = {}) {
  json reference;
  std::ifstream(folder / "dpo.json") >> reference;
  const test::TempDir directory;
  json text = {
      {"model", reference["model"]},
      {"data",
       {{"pairs", {(folder / "pairs.safetensors").string()}},
        {"sequence_length", reference["sequence_length"]},
        {"held_out", 0},
        {"shuffle", false}}},
      {"optimizer",
       {{"type", "AdamW"},
        {"params",
         {{"lr", reference["lr"]}, {"betas", {0.9, 0.95}}, {"eps", 1e-6}, {"weight_decay", 0}}}}},
      {"bf16", {{"enabled", false}}},
      {"gradient_clipping", 0},
      {"train_micro_batch_size_per_gpu", reference["pairs"]},
      {"gradient_accumulation_steps", reference["micro_batches"]},
      {"zero_optimization",
       {{"offload_optimizer", {{"device", "cpu"}}}, {"offload_param", {{"device", "cpu"}}}}},
      {"ballast",
       {{"device", test::device_kind()},
        {"device_bytes", "128MiB"},
        {"host_bytes", "64MiB"},
        {"train", "adapters"},
        {"adapters", {{"path", (folder / "adapters").string()}}},
        {"preference", {{"beta", reference["beta"]}}},
        {"out", directory.path().string()}}}};
  text["model"]["weights"] = initial.string();
  const config::Config config = config::parse(text.dump(), directory.path(), "dpo", overrides);
  engine::Engine engine = setup::make_engine(config);
  train::start_from_weights(engine, config, [](Bytes, Bytes) {});
  const data::TrainingData data = data::open_training_data(config);
  const data::Loader loader(data.training, nullptr,
                            {.micro_batches = config.batch.accumulation,
                             .sequences = config.micro_sequences(),
                             .length = config.data.sequence_length});
  const std::uint64_t steps = test::device_kind() == "cuda" ? 3 : reference["steps"].size();
  double last = 0.0;
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const json& theirs = reference["steps"][step - 1];
    const data::Batch batch = loader.batch(step);
    const auto ours = engine.train_step({batch.tokens, batch.targets}, reference["lr"]);
    EXPECT_LT(relative(ours.loss, theirs["loss"]), 1e-4) << "step " << step;
    EXPECT_LT(relative(ours.grad_norm, theirs["grad_norm"]), 1e-4) << "step " << step;
    EXPECT_NEAR(ours.pairs.chosen, theirs["chosen"].get<double>(), 1e-4) << "step " << step;
    EXPECT_NEAR(ours.pairs.rejected, theirs["rejected"].get<double>(), 1e-4) << "step " << step;
    EXPECT_DOUBLE_EQ(ours.pairs.correct, theirs["accuracy"].get<double>()) << "step " << step;
    last = ours.loss;
    if (!theirs.contains("balance")) continue;
    EXPECT_LT(relative(ours.balance_loss, theirs["balance"]), 1e-4) << "step " << step;
  }
  return last;
}

TAG_TESTS("emulated", "PytorchParity.PreferencesInFp32:PytorchParity.PreferencesOfExpertsInFp32");
/// Ten steps of TRL's DPOTrainer: tests/data/make_preference_fixture.py.
TEST(PytorchParity, PreferencesInFp32) {
  expect_preferences(test::fixture("preferences"), fixture("llama.initial.safetensors"));
}

/// tests/data/make_mixture_preference_fixture.py. The reference model chooses its own experts, and
/// the router losses are those of the trained model.
TEST(PytorchParity, PreferencesOfExpertsInFp32) {
  const std::filesystem::path folder = test::fixture("mixture_preferences");
  const std::filesystem::path initial = folder / "initial.safetensors";
  const double loss = expect_preferences(folder, initial);
  if (test::device_kind() == "cuda") return;
  const std::vector<std::vector<std::string>> variants = {
      {"ballast.expert_prefetch=true", "ballast.device_weight_buffers=4"},
      {"pipeline.stages=2", "ballast.recompute=true"},
      {"zero_optimization.offload_param.device=nvme", "ballast.delay_seed=5"}};
  for (const auto& variant : variants) {
    EXPECT_EQ(expect_preferences(folder, initial, variant), loss) << variant.front();
  }
}

TEST(PytorchParity, Gpt2InFp32) {
  expect_fp32_parity("gpt2");
}
TEST(PytorchParity, Gpt2InTilesInFp32) {
  expect_fp32_parity("gpt2", {{"layer_tiles", 2}});
}
TEST(PytorchParity, LlamaInFp32) {
  expect_fp32_parity("llama");
}
TEST(PytorchParity, TiedLlamaInFp32) {
  expect_fp32_parity("llama_tied");
}
TEST(PytorchParity, FrozenGpt2InFp32) {
  expect_fp32_parity("gpt2_frozen");
}
TEST(PytorchParity, FrozenLlamaInFp32) {
  expect_fp32_parity("llama_frozen");
}
TEST(PytorchParity, FrozenTiedLlamaInFp32) {
  expect_fp32_parity("llama_tied_frozen");
}
TEST(PytorchParity, LlamaWithAdaptersInFp32) {
  expect_fp32_parity("llama_lora");
}
TEST(PytorchParity, LlamaWithRanksByNamesInFp32) {
  expect_fp32_parity("llama_patterns");
}
TEST(PytorchParity, Gpt2WithAdaptersInFp32) {
  expect_fp32_parity("gpt2_lora");
}
TEST(PytorchParity, ExpertsInFp32) {
  expect_fp32_parity("qwen2_moe");
}
TAG_TESTS("emulated", "PytorchParity.ExpertsWithAdaptersInFp32");
TEST(PytorchParity, ExpertsWithAdaptersInFp32) {
  expect_fp32_parity("qwen2_moe_lora");
}
TEST(PytorchParity, LlamaWithDoraInFp32) {
  expect_fp32_parity("llama_dora");
}
TAG_TESTS("emulated", "PytorchParity.Gpt2WithDoraInFp32");
TEST(PytorchParity, Gpt2WithDoraInFp32) {
  expect_fp32_parity("gpt2_dora");
}

/// Magnitudes begin like PEFT's: the norms of the model's matrices.
TEST(PytorchParity, MagnitudesBeginAsThoseOfPeft) {
  for (const std::string name : {"llama_dora", "gpt2_dora"}) {
    json reference;
    std::ifstream(fixture(name + ".json")) >> reference;
    const json& wanted = reference["adapters"];
    const test::TempDir directory;
    json text = make_config(reference, DType::f32);
    text["ballast"]["out"] = directory.path().string();
    text["ballast"]["train"] = "adapters";
    text["ballast"]["adapters"] = {
        {"targets", wanted["target_modules"]}, {"rank", wanted["r"]}, {"dora", true}};
    const std::string start = reference["initial"];
    text["model"]["weights"] = fixture(start + ".initial.safetensors").string();
    const config::Config config = config::parse(text.dump(), directory.path(), name, {});
    engine::Engine engine = setup::make_engine(config);
    train::start_from_weights(engine, config,
                              [](Bytes done, Bytes total) { EXPECT_LE(done, total); });
    const formats::SafetensorsReader theirs(fixture(name) / "adapter_model.safetensors");
    std::size_t found = 0;
    for (const auto& [tensor, values] : initial_values(engine)) {
      if (!tensor.ends_with(".lora_magnitude_vector")) continue;
      ++found;
      std::vector<float> expected(values.size());
      theirs.read("base_model.model." + tensor, expected);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_LT(relative(values[i], expected[i]), 1e-6) << tensor << ' ' << i;
      }
    }
    EXPECT_EQ(found, 2 * wanted["target_modules"].size());
  }
}

TAG_TESTS("emulated", "PytorchParity.LlamaWithAdaptersInBf16");
TEST(PytorchParity, LlamaWithAdaptersInBf16) {
  expect_bf16_parity("llama_lora");
}
TEST(PytorchParity, Gpt2WithAdaptersInBf16) {
  expect_bf16_parity("gpt2_lora");
}
TEST(PytorchParity, LlamaWithDoraInBf16) {
  expect_bf16_parity("llama_dora");
}
TAG_TESTS("emulated", "PytorchParity.FrozenGpt2InBf16");
TEST(PytorchParity, FrozenGpt2InBf16) {
  expect_bf16_parity("gpt2_frozen");
}
TEST(PytorchParity, FrozenLlamaInBf16) {
  expect_bf16_parity("llama_frozen");
}
TEST(PytorchParity, FrozenTiedLlamaInBf16) {
  expect_bf16_parity("llama_tied_frozen");
}

TEST(PytorchParity, Gpt2InBf16) {
  expect_bf16_parity("gpt2");
}
TAG_TESTS("emulated", "PytorchParity.LlamaInBf16");
TEST(PytorchParity, LlamaInBf16) {
  expect_bf16_parity("llama");
}
TEST(PytorchParity, TiedLlamaInBf16) {
  expect_bf16_parity("llama_tied");
}

}  // namespace
}  // namespace ballast::pytorch_parity_test
