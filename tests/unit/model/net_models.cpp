#include "tests/unit/model/net_models.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ballast/core/error.h"
#include "ballast/setup/translate.h"

#include "tests/support/fixtures.h"
#include "tests/support/tiny_config.h"

namespace ballast::model_net {
namespace {

using nlohmann::json;

const std::filesystem::path kExamples = BALLAST_CONFIGS;

std::optional<SmallModel> read_model(const std::filesystem::path& file) {
  json record;
  std::ifstream(file) >> record;
  if (!record.contains("model")) return std::nullopt;
  const std::string section = record["model"].dump();
  return SmallModel{file.stem(), section.substr(1, section.size() - 2)};
}

bool reads_folder(const std::filesystem::path& example) {
  std::ifstream file(example);
  const json config = json::parse(file, nullptr, true, true);  // with comments
  return !config.contains("model") || config["model"].contains("weights") ||
         config["model"].contains("path");
}

/// Returns the model with four layers: some models have 20,000 blocks.
model::Architecture example_model(const std::filesystem::path& example) {
  const std::vector<std::string> shorter = {"model.num_layers=4"};
  try {
    return setup::model_of(config::load(example, shorter, 0));
  } catch (const Error&) {
    return setup::model_of(config::load(example, {}, 0));
  }
}

std::optional<ConfiguredModel> configure_or_refuse(const std::string& section,
                                                   const std::vector<std::string>& overrides,
                                                   std::uint64_t ranks) {
  try {
    const config::Config config = test::tiny_config(section, false, "/unused", overrides, ranks);
    return ConfiguredModel{config, setup::model_of(config)};
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::config) throw;
    return std::nullopt;
  }
}

/// Sets the changes of a model: the first that its family accepts.
void find_changes(SmallModel& model) {
  using Changes = std::vector<std::string>;
  const auto first_of = [&](const std::vector<Changes>& choices) {
    const auto accepted = [&](const Changes& changes) {
      return configure_or_refuse(model.section, changes, 1).has_value();
    };
    const auto found = std::ranges::find_if(choices, accepted);
    expects(found != choices.end(), "a model of the fixtures is refused");
    return *found;
  };
  const std::string length = "data.sequence_length=80";
  // Families that choose keys only have kernels for sequences that need no choice.
  model.longer =
      first_of({{length}, {length, "model.max_sequence=128"}, {"data.sequence_length=36"}});
  const auto with = [&](Changes heads) {
    heads.insert(heads.end(), model.longer.begin(), model.longer.end());
    return heads;
  };
  model.shared = first_of({with({"model.num_heads=4", "model.num_kv_heads=2"}),
                           with({"model.num_heads=4", "model.num_kv_heads=4"}),
                           with({"model.num_heads=4"}), model.longer});
}

/// Overrides of a config for Variation::training and Variation::ranks.
std::vector<std::string> overrides_of(std::string_view choice) {
  static const std::string kAdapters = R"(ballast.adapters={"rank": 4, "targets": "all-linear")";
  static const std::string kTrain = "ballast.train=adapters";
  static const std::map<std::string_view, std::vector<std::string>> kOverrides = {
      {"all", {}},
      {"lora", {kTrain, kAdapters + "}"}},
      {"dropout", {kTrain, kAdapters + R"(, "dropout": 0.25})"}},
      {"dora", {kTrain, kAdapters + R"(, "dora": true})"}},
      {"pairs",  // with a reference model
       {kTrain, kAdapters + "}", "ballast.eval_batches=1", R"(data={"pairs": "unused.pt"})"}},
      {"nf4", {kTrain, kAdapters + "}", "ballast.quantized_base=nf4"}},
      {"norms", {R"(ballast.train=["*norm*"])"}},
      {"one", {}},
      {"parts", {"sequence_parallel_size=2"}},        // of two sequences
      {"part of one", {"sequence_parallel_size=2"}},  // of one sequence
      {"tensor", {"tensor_parallel.autotp_size=2"}},
      {"experts", {"ballast.expert_parallel=2"}}};
  return kOverrides.at(choice);
}

/// The limit that cuts the rows of an MLP, or of experts, into chunks of 32 rows or a little more.
Bytes bytes_of_chunk(const model::ModelConfig& config, DType type) {
  return Bytes{32} * 3 * config.intermediate_size * size_of(type);
}

std::optional<RecordedModel> vary(const SmallModel& model, const Variation& how) {
  std::vector<std::string> overrides;
  const auto add = [&](const std::vector<std::string>& more) {
    overrides.insert(overrides.end(), more.begin(), more.end());
  };
  add(overrides_of(how.training));
  add(overrides_of(how.ranks));
  if (how.tiles) add({"model.layer_tiles=2", "model.vocabulary_tiles=2"});
  if (how.wide) add({"model.vocab_size=131"});
  const bool alone = how.ranks == "one";
  const bool shares_heads = how.tiles || (!alone && how.ranks != "experts");
  auto configured = configure(model, overrides, shares_heads, alone ? 1 : 2);
  if (!configured) return std::nullopt;
  RecordedModel made = {.name = fmt::format("{}/{}", model.name, how.name),
                        .whole = std::move(configured->model),
                        .own = {},
                        .type = how.bf16 ? DType::bf16 : DType::f32,
                        .shape = {.micro_batch = setup::shape_of(configured->config, 2)},
                        .mlp = {.joins_gate_and_up = how.joins},
                        .later = how.later};
  if (how.ranks == "experts" && made.whole.split.experts == 1) return std::nullopt;
  made.own = how.ranks == "tensor" ? at_tensor_place(made.whole, 1) : made.whole;
  if (how.ranks == "part of one") made.shape.micro_batch.sequences = 1;
  made.shape.packed = how.packed;
  made.shape.pairs = how.training == "pairs";
  made.shape.ranks = how.ranks == "experts" ? 2 : 1;
  if (how.ranks == "tensor") made.shape.sum_scratch = 8192;
  if (how.cuts) made.mlp.bytes = bytes_of_chunk(made.own.config, made.type);
  return made;
}

}  // namespace

const std::vector<SmallModel>& small_models() {
  static const std::vector<SmallModel> kModels = [] {
    std::vector<SmallModel> models = {read_model(test::fixture("training/gpt2.json")).value()};
    for (const auto& file : std::filesystem::directory_iterator(test::fixture("families"))) {
      if (file.path().extension() != ".json") continue;
      if (auto model = read_model(file.path())) models.push_back(std::move(*model));
    }
    for (SmallModel& model : models) find_changes(model);
    std::ranges::sort(models, {}, &SmallModel::name);
    return models;
  }();
  return kModels;
}

std::optional<ConfiguredModel> configure(const SmallModel& model,
                                         const std::vector<std::string>& overrides,
                                         bool shares_heads, std::uint64_t ranks) {
  std::vector<std::string> all = overrides;
  const std::vector<std::string>& own = shares_heads ? model.shared : model.longer;
  all.insert(all.end(), own.begin(), own.end());
  return configure_or_refuse(model.section, all, ranks);
}

std::vector<std::pair<std::string, model::Architecture>> example_models() {
  std::vector<std::pair<std::string, model::Architecture>> models;
  for (const auto& file : std::filesystem::directory_iterator(kExamples)) {
    if (file.path().extension() != ".json" || reads_folder(file.path())) continue;
    models.emplace_back(file.path().stem(), example_model(file.path()));
  }
  std::ranges::sort(models, {}, &std::pair<std::string, model::Architecture>::first);
  return models;
}

const std::vector<Variation>& variations() {
  static const std::vector<Variation> kAll = {
      {.name = "plain"},
      {.name = "parts",
       .ranks = "parts",
       .cuts = true,
       .joins = true,
       .bf16 = true,
       .later = true,
       .wide = true},
      {.name = "part_of_one",
       .ranks = "part of one",
       .cuts = true,
       .joins = true,
       .packed = true,
       .later = true},
      {.name = "lora", .training = "lora", .joins = true, .bf16 = true, .wide = true},
      {.name = "lora_parts", .training = "lora", .ranks = "parts", .cuts = true, .later = true},
      {.name = "lora_part_of_one",
       .training = "lora",
       .ranks = "part of one",
       .cuts = true,
       .joins = true,
       .packed = true},
      {.name = "dropout",
       .training = "dropout",
       .cuts = true,
       .joins = true,
       .packed = true,
       .later = true,
       .wide = true},
      {.name = "dropout_parts",
       .training = "dropout",
       .ranks = "parts",
       .cuts = true,
       .bf16 = true,
       .packed = true,
       .wide = true},
      {.name = "dropout_part_of_one", .training = "dropout", .ranks = "part of one", .bf16 = true},
      {.name = "dora", .training = "dora", .bf16 = true, .wide = true},
      {.name = "dora_parts",
       .training = "dora",
       .ranks = "parts",
       .cuts = true,
       .joins = true,
       .packed = true,
       .later = true},
      {.name = "dora_part_of_one",
       .training = "dora",
       .ranks = "part of one",
       .bf16 = true,
       .wide = true},
      {.name = "pairs",
       .training = "pairs",
       .cuts = true,
       .joins = true,
       .bf16 = true,
       .later = true,
       .wide = true},
      {.name = "pairs_parts", .training = "pairs", .ranks = "parts"},
      {.name = "tiles", .tiles = true},
      {.name = "tiles_cut",
       .cuts = true,
       .joins = true,
       .tiles = true,
       .bf16 = true,
       .packed = true,
       .later = true,
       .wide = true},
      {.name = "tensor", .ranks = "tensor", .joins = true, .tiles = true, .packed = true},
      {.name = "experts", .ranks = "experts", .cuts = true, .bf16 = true},
      {.name = "nf4", .training = "nf4", .cuts = true, .bf16 = true},
      {.name = "norms", .training = "norms", .joins = true, .packed = true, .later = true}};
  return kAll;
}

const std::vector<RecordedModel>& recorded_models() {
  static const std::vector<RecordedModel> kAll = [] {
    std::vector<RecordedModel> all;
    for (const SmallModel& model : small_models()) {
      for (const Variation& how : variations()) {
        if (auto made = vary(model, how)) all.push_back(std::move(*made));
      }
    }
    return all;
  }();
  return kAll;
}

}  // namespace ballast::model_net
