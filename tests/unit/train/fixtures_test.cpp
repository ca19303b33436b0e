#include "tests/support/fixtures.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/data/loader.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/family.h"
#include "ballast/train/trainer.h"

#include "src/train/initial_weights.h"
#include "src/train/step_rules.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"

namespace ballast::train::fixtures_test {
namespace {

std::filesystem::path folder() {
  return test::fixture("training");
}

nlohmann::json load(const std::string& name) {
  std::ifstream file(folder() / (name + ".json"));
  return nlohmann::json::parse(file);
}

/// The readers read files that PyTorch wrote: see tests/data/make_training_fixtures.py.
class TrainingFixture : public testing::TestWithParam<std::string> {
 protected:
  const nlohmann::json recorded_ = load(GetParam());
};

TEST_P(TrainingFixture, RatesAreThoseOfTheSchedule) {
  const auto& from = recorded_["scheduler"];
  config::SchedulerSection section;
  section.type = config::SchedulerSection::Type::warmup;
  section.warmup_min_lr = from["warmup_min_lr"];
  section.warmup_max_lr = from["warmup_max_lr"].get<double>();
  section.warmup_num_steps = from["warmup_num_steps"];
  section.warmup_linear = from["warmup_type"] == "linear";
  const LrSchedule schedule(section, 1.0);
  const std::vector<double> rates = recorded_["lr"];
  ASSERT_EQ(rates.size(), 30U);
  for (std::size_t i = 0; i < rates.size(); ++i) {
    EXPECT_NEAR(schedule.at(i + 1), rates[i], 1e-15) << "step " << i + 1;
  }
}

TEST_P(TrainingFixture, TokensMakeExactlyTheRecordedSteps) {
  const auto& geometry = recorded_["batch"];
  const std::uint64_t steps = geometry["steps"];
  data::LoaderOptions options;
  options.micro_batches = geometry["micro_batches"];
  options.sequences = geometry["sequences"];
  options.length = geometry["sequence_length"];
  config::DataSection data;
  data.tokens = {folder() / "tokens.u16.bin"};
  const auto source = std::make_shared<const data::TokenSource>(
      data::TokenSource::open(data, recorded_["model"]["vocab_size"].get<std::uint64_t>()));
  const auto per_step = options.micro_batches * options.sequences * options.length;
  ASSERT_EQ(source->size(), steps * per_step + 1);
  data::Loader loader(data::windows_of(source, {0, source->size()}, options.length, false, 0),
                      nullptr, options);
  std::vector<std::int32_t> whole(source->size());
  source->read(0, whole);
  for (std::uint64_t step = 0; step < steps; ++step) {
    const auto batch = loader.next();
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(step * per_step);
    const auto count = static_cast<std::ptrdiff_t>(per_step);
    EXPECT_TRUE(std::equal(batch.tokens.begin(), batch.tokens.end(), begin, begin + count));
    EXPECT_TRUE(
        std::equal(batch.targets.begin(), batch.targets.end(), begin + 1, begin + 1 + count));
  }
}

TEST_P(TrainingFixture, WeightsAreOneTensorForEveryGradient) {
  for (const std::string state : {".initial", ".final"}) {
    const formats::SafetensorsReader reader(folder() / (GetParam() + state + ".safetensors"));
    const auto& norms = recorded_["runs"]["fp32"]["first_step_grad_norms"];
    EXPECT_EQ(reader.tensors().size(), norms.size());
    double sum = 0.0;
    for (const auto& tensor : reader.tensors()) {
      ASSERT_TRUE(norms.contains(tensor.name)) << tensor.name;
      sum += norms[tensor.name].get<double>() * norms[tensor.name].get<double>();
      std::vector<float> values(tensor.elements);
      reader.read(tensor.name, values);
      for (const float value : values) ASSERT_LT(std::abs(value), 2.0F) << tensor.name;
    }
    EXPECT_NEAR(std::sqrt(sum), recorded_["runs"]["fp32"]["grad_norm"][0].get<double>(), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, TrainingFixture, testing::Values("gpt2", "llama", "llama_tied"),
                         [](const auto& info) { return info.param; });

std::filesystem::path weights_of(const std::string& name) {
  return std::filesystem::absolute(folder() / (name + ".initial.safetensors"));
}

/// The model of fixture `name`, with `changes` to its keys, and initial weights from `path`.
config::Config config_of(const std::string& name, const std::filesystem::path& path,
                         const nlohmann::json& changes = {}) {
  nlohmann::json text = {{"data", {{"tokens", "none.bin"}, {"sequence_length", 37}}},
                         {"train_micro_batch_size_per_gpu", 1}};
  text["model"] = load(name)["model"];
  if (!changes.is_null()) text["model"].update(changes);
  text["model"]["weights"] = path.string();
  return config::parse(text.dump(), "/", "test", {});
}

void expect_refused(const config::Config& config, std::initializer_list<std::string_view> parts,
                    ErrorCategory category = ErrorCategory::data) {
  test::expect_error(category, {"model.weights: "}, [&] { check_initial_weights(config); });
  test::expect_error(category, parts, [&] { check_initial_weights(config); });
}

TEST(InitialWeights, AreAcceptedOnlyForTheirModel) {
  for (const std::string name : {"gpt2", "llama", "llama_tied"}) {
    check_initial_weights(config_of(name, weights_of(name)));
    check_initial_weights(config_of(name, ""));
  }
}

TEST(InitialWeights, NameTheKeyWhenTheyCannotBeRead) {
  const test::TempDir dir;
  const auto none = dir.path() / "none.safetensors";
  expect_refused(config_of("gpt2", none),
                 {"cannot read " + none.string() + ": No such file or directory"});
  expect_refused(config_of("gpt2", dir.write("short", "1234")), {"has 4 bytes: too short"});
}

/// Writes the tensors of a fixture to `folder` as `count` files with an index, as `type`.
void write_shards(const std::string& name, const std::filesystem::path& folder, std::size_t count,
                  DType type = DType::f32) {
  const formats::SafetensorsReader whole(weights_of(name));
  nlohmann::json index = {{"metadata", nlohmann::json::object()}};
  for (std::size_t i = 0; i < count; ++i) {
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
    std::vector<formats::TensorToStore> tensors;
    for (std::size_t t = i; t < whole.tensors().size(); t += count) {
      tensors.push_back({whole.tensors()[t].name, type, whole.tensors()[t].shape});
      index["weight_map"][tensors.back().name] = file;
    }
    formats::SafetensorsWriter writer(folder / file, tensors);
    for (const formats::TensorToStore& tensor : tensors) {
      std::vector<float> values(whole.find(tensor.name)->elements);
      whole.read(tensor.name, values);
      writer.write(tensor.name, values);
    }
    writer.finish();
  }
  std::ofstream(folder / formats::kWeightsIndex) << index;
}

TEST(InitialWeights, MayBeAFolderOrAnIndex) {
  const test::TempDir dir;
  write_shards("llama", dir.path(), 3);
  const formats::SafetensorsReader whole(weights_of("llama"));
  for (const auto& path : {dir.path(), dir.path() / formats::kWeightsIndex}) {
    const config::Config config = config_of("llama", path);
    check_initial_weights(config);
    const formats::WeightFiles files(path);
    formats::WeightReader reader(files, {});
    for (const auto& block : model::build_architecture(config.model).blocks) {
      for (const auto& tensor : block.tensors) {
        std::vector<float> values(tensor.size);
        std::vector<float> expected(tensor.size);
        read_initial_weights(place_of(files, tensor), reader, tensor, 0, values);
        whole.read(tensor.name, expected);
        EXPECT_EQ(values, expected) << tensor.name;
      }
    }
  }
  expect_refused(
      config_of("llama", dir.path(), {{"num_layers", 3}}),
      {formats::kWeightsIndex + std::string(" has no tensor 'model.layers.2.input_layernorm")});
  expect_refused(config_of("llama", dir.path(), {{"vocab_size", 130}}),
                 {"-of-00003.safetensors: tensor '", "has shape [131, 48]"});
  const test::TempDir single;
  std::filesystem::copy_file(weights_of("llama"), single.path() / formats::kSingleWeights);
  check_initial_weights(config_of("llama", single.path()));
}

TEST(InitialWeights, AreRefusedIfATensorIsMissingOrHasAnotherShape) {
  expect_refused(config_of("llama", weights_of("llama"), {{"num_layers", 3}}),
                 {"has no tensor 'model.layers.2.input_layernorm.weight'"});
  expect_refused(config_of("llama", weights_of("llama"), {{"vocab_size", 130}}),
                 {"has shape [131, 48], but the model needs [130, 48]"});
  const test::TempDir dir;
  const auto shard = dir.path() / "model-00001-of-00002.safetensors";
  std::filesystem::copy_file(weights_of("llama"), shard);
  expect_refused(config_of("llama", shard, {{"num_layers", 3}}),
                 {"is one file of a sharded model"});
}

using Shape = std::vector<std::uint64_t>;

/// Writes the weights of fixture `name` and one more tensor of `value`s to `path`. Without a value
/// it is a copy of the embedding.
void write_with(const std::string& name, const std::filesystem::path& path,
                const std::string& added, const Shape& shape, std::optional<float> value = 0.5F) {
  const formats::SafetensorsReader from(weights_of(name));
  std::vector<formats::TensorToStore> tensors = {{added, DType::f32, shape}};
  std::vector<float> values;
  if (value) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    values.assign(count, *value);
  } else {
    values.resize(from.find("model.embed_tokens.weight")->elements);
    from.read("model.embed_tokens.weight", values);
  }
  for (const formats::StoredTensor& tensor : from.tensors()) {
    tensors.push_back({tensor.name, DType::f32, tensor.shape});
    const std::size_t start = values.size();
    values.resize(start + tensor.elements);
    from.read(tensor.name, std::span(values).subspan(start));
  }
  formats::SafetensorsWriter writer(path, tensors);
  std::span<const float> left = values;
  for (const formats::TensorToStore& tensor : tensors) {
    Elems count = 1;
    for (const std::uint64_t extent : tensor.shape) count *= extent;
    writer.write(tensor.name, left.first(count));
    left = left.subspan(count);
  }
  writer.finish();
}

TEST(InitialWeights, RefuseTensorsThatTheModelDoesNotUse) {
  expect_refused(config_of("llama", weights_of("llama"), {{"num_layers", 1}}),
                 {weights_of("llama").string() + " has 9 tensors that this model does not use (",
                  "model.layers.1.", ", ...)", "change the keys of model"});
  const test::TempDir dir;
  const auto path = dir.path() / "w.safetensors";
  write_with("llama", path, "model.layers.0.self_attn.q_proj.bias", {48});
  expect_refused(
      config_of("llama", path),
      {"has 1 tensor that this model does not use (model.layers.0.self_attn.q_proj.bias)"});
  write_with("gpt2", path, "a\nb", {1});
  expect_refused(config_of("gpt2", path), {"(a\\u000ab)"});
}

TEST(InitialWeights, MayHoldBuffersOfTheirFamily) {
  const test::TempDir dir;
  const auto path = dir.path() / "w.safetensors";
  const auto with = [&](const std::string& name, const std::string& added, const Shape& shape) {
    write_with(name, path, added, shape);
    return config_of(name, path);
  };
  const std::string layer = "transformer.h.1.attn.";
  check_initial_weights(with("gpt2", layer + "bias", {1, 1, 48, 48}));
  check_initial_weights(with("gpt2", layer + "masked_bias", {}));
  expect_refused(with("gpt2", layer + "bias", {1, 1, 47, 47}), {"(" + layer + "bias)"});
  expect_refused(with("gpt2", layer + "c_proj.masked_bias", {}), {"masked_bias)"});
  const std::string frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq";
  check_initial_weights(with("llama", frequencies, {4}));
  expect_refused(with("llama", frequencies, {8}), {"(" + frequencies + ")"});
  expect_refused(with("gpt2", frequencies, {8}), {"(" + frequencies + ")"});
}

TEST(InitialWeights, AreTiedLikeTheModel) {
  const test::TempDir dir;
  const auto path = dir.path() / "w.safetensors";
  write_with("llama_tied", path, "lm_head.weight", {131, 48}, {});
  check_initial_weights(config_of("llama_tied", path));
  const nlohmann::json tied = {{"tie_embeddings", true}};
  expect_refused(config_of("llama", weights_of("llama"), tied),
                 {"'lm_head.weight' differs from 'model.embed_tokens.weight'",
                  "set model.tie_embeddings to false"});
  write_with("llama_tied", path, "lm_head.weight", {131, 47});
  expect_refused(config_of("llama_tied", path), {"differs"});
  expect_refused(config_of("llama_tied", weights_of("llama_tied"), {{"tie_embeddings", false}}),
                 {"has no tensor 'lm_head.weight'", "set model.tie_embeddings to true"});
}

/// Hugging Face's config.json of the fixtures "llama" and "gpt2".
const nlohmann::json kLlamaConfig = nlohmann::json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131,
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": null, "intermediate_size": 136, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "rope_scaling": null,
    "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
    "hidden_act": "silu", "torch_dtype": "float32"
})");
const nlohmann::json kGpt2Config = nlohmann::json::parse(R"({
    "model_type": "gpt2", "vocab_size": 131, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_inner": null, "n_positions": 48, "layer_norm_epsilon": 1e-05,
    "activation_function": "gelu_new"
})");

/// A folder with the weights of a fixture and its config.json, with one key changed.
struct Checkpoint {
  Checkpoint(std::string fixture, const std::string& key, const nlohmann::json& value)
      : name(std::move(fixture)) {
    nlohmann::json whole = name == "gpt2" ? kGpt2Config : kLlamaConfig;
    whole[key] = value;
    dir.write("config.json", whole.dump());
    std::filesystem::copy_file(weights_of(name), dir.path() / "model.safetensors");
  }
  [[nodiscard]] config::Config config(const nlohmann::json& changes = {}) const {
    return config_of(name, dir.path() / "model.safetensors", changes);
  }
  std::string name;
  test::TempDir dir;
};

TEST(InitialWeights, AgreeWithTheirConfig) {
  check_initial_weights(Checkpoint("gpt2", "n_inner", 256).config());
  check_initial_weights(Checkpoint("gpt2", "n_inner", nullptr).config());
  check_initial_weights(Checkpoint("llama", "head_dim", 8).config());
  check_initial_weights(Checkpoint("llama", "rope_theta", nullptr).config());
  const nlohmann::json rope = {{"rope_theta", 10000.0}, {"rope_type", "default"}};
  check_initial_weights(Checkpoint("llama", "rope_parameters", rope).config());
}

TEST(InitialWeights, MayBeNextToABallastConfig) {
  const Checkpoint checkpoint("llama", "model", {{"hidden_size", 4}});
  checkpoint.dir.write("config.json", "{/* small */ \"model\": {\"hidden_size\": 4}}");
  check_initial_weights(checkpoint.config());
}

TEST(InitialWeights, NameTheKeyThatDiffersFromTheirConfig) {
  const auto expect = [](const char* fixture, const std::string& key, const nlohmann::json& value,
                         const std::string& own, const std::string& ours) {
    const Checkpoint checkpoint(fixture, key, value);
    const auto file = (checkpoint.dir.path() / "config.json").string();
    const std::string theirs = value.dump();
    expect_refused(checkpoint.config(),
                   {file + ": " + key + " is " + theirs + ", but model." + own + " is " + ours +
                    "; set model." + own + " to " + theirs + ", or give other weights"},
                   ErrorCategory::config);
  };
  expect("llama", "model_type", "gpt2", "family", "\"llama\"");
  expect("llama", "vocab_size", 132, "vocab_size", "131");
  expect("llama", "hidden_size", 64, "hidden_size", "48");
  expect("llama", "num_hidden_layers", 3, "num_layers", "2");
  expect("llama", "num_attention_heads", 3, "num_heads", "6");
  expect("llama", "num_key_value_heads", 1, "num_kv_heads", "2");
  expect("llama", "head_dim", 16, "head_dim", "8");
  expect("llama", "intermediate_size", 128, "intermediate_size", "136");
  expect("llama", "rms_norm_eps", 0.5, "norm_epsilon", "1e-06");
  expect("llama", "rope_theta", 500000, "rope_theta", "10000.0");
  expect("llama", "tie_word_embeddings", true, "tie_embeddings", "false");
  expect("llama", "attention_bias", true, "attention_bias", "false");
  expect("llama", "mlp_bias", true, "mlp_bias", "false");
  expect("llama", "rope_scaling", {{"rope_type", "linear"}}, "rope_scaling", "null");
  expect("gpt2", "n_embd", 32, "hidden_size", "64");
  expect("gpt2", "n_layer", 3, "num_layers", "2");
  expect("gpt2", "n_head", 2, "num_heads", "4");
  expect("gpt2", "n_inner", 64, "intermediate_size", "256");
  expect("gpt2", "n_positions", 64, "max_sequence", "48");
  expect("gpt2", "layer_norm_epsilon", 0.5, "norm_epsilon", "1e-05");
  expect("gpt2", "tie_word_embeddings", false, "tie_embeddings", "true");
}

TEST(InitialWeights, HaveTheHeadsOfTheirConfigEvenIfShapesMatch) {
  const Checkpoint checkpoint("llama", "head_dim", nullptr);
  expect_refused(checkpoint.config({{"num_heads", 12}, {"num_kv_heads", 4}}),
                 {"num_attention_heads is 6, but model.num_heads is 12; set model.num_heads to 6"},
                 ErrorCategory::config);
}

TEST(InitialWeights, OfAModelThatBallastCannotComputeAreRefused) {
  const auto expect = [](const char* fixture, const std::string& key, const nlohmann::json& value,
                         const std::string& reason) {
    expect_refused(Checkpoint(fixture, key, value).config(),
                   {"config.json: " + reason + "; give the weights of another model"},
                   ErrorCategory::config);
  };
  std::vector<std::string> types;
  for (const std::string& name : model::family_names()) {
    types.emplace_back(model::family(name).checkpoint_type());
  }
  expect(
      "llama", "model_type", "bloom",
      fmt::format("model_type is \"bloom\", but Ballast supports only {}", fmt::join(types, ", ")));
  expect("llama", "hidden_act", "gelu",
         "hidden_act is \"gelu\", but Ballast supports only silu, swish");
  expect("gpt2", "activation_function", "relu",
         "activation_function is \"relu\", but Ballast supports only gelu_new, gelu_pytorch_tanh, "
         "gelu_fast");
  expect("gpt2", "scale_attn_by_inverse_layer_idx", true,
         "scale_attn_by_inverse_layer_idx is true, but Ballast supports only false");
}

/// Fails the test if a run gets as far as a plan.
struct NoRun : Observer {
  void planned(const engine::Blueprint& /*blueprint*/, const std::string& /*device*/) override {
    ADD_FAILURE() << "the run was planned";
  }
  void started(const RunStart& /*start*/) override { ADD_FAILURE() << "the run started"; }
  void stepped(const StepReport& /*report*/) override {}
  void finished(const RunSummary& /*summary*/) override {}
};

TEST(InitialWeights, AreCheckedBeforePlanning) {
  config::Config config = config_of("llama", weights_of("llama"), {{"num_layers", 3}});
  config.ballast.device_bytes = 1;  // planning would refuse this
  NoRun observer;
  test::expect_error(ErrorCategory::data, {"model.weights: ", "has no tensor"},
                     [&] { train(config, observer, nullptr); });
}

TEST(TrainingData, ThatCannotBeReadNamesItsKeyBeforePlanning) {
  const test::TempDir dir;
  config::Config config = config_of("llama", "");
  config.ballast.out = dir.path() / "new/run";
  config.ballast.device = config::DeviceChoice::host;
  config.ballast.device_bytes = 1;  // planning would refuse this
  NoRun observer;
  test::expect_error(ErrorCategory::data, {"data.tokens: cannot read /none.bin: No such file"},
                     [&] { train(config, observer, nullptr); });
  config.data.text = {"/none.txt"};
  config.data.tokens.clear();
  test::expect_error(ErrorCategory::data, {"data.text: cannot read /none.txt: No such file"},
                     [&] { train(config, observer, nullptr); });
  config.data.text = {dir.write("short.txt", "short")};
  test::expect_error(ErrorCategory::data, {"data.text: ", "5 tokens to train on"},
                     [&] { train(config, observer, nullptr); });
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "new"));
}

}  // namespace
}  // namespace ballast::train::fixtures_test
