#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/formats/export.h"
#include "ballast/formats/file_formats.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"
#include "ballast/train/trainer.h"

#include "src/data/training_data.h"
#include "src/formats/adapter_files.h"
#include "src/train/initial_weights.h"
#include "src/train/run_directory.h"
#include "src/train/run_engine.h"
#include "src/train/run_files.h"
#include "src/train/run_inputs.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Accepts runs of any number of ranks.
constexpr std::uint64_t kAnyWorld = 0;

/// Returns whether the folder has PEFT adapters without their model.
bool has_only_adapters(const fs::path& folder) {
  std::error_code ignored;
  return formats::is_adapter_folder(folder) &&
         !fs::exists(folder / config::kCheckpointConfig, ignored);
}

/// Returns the base model of the adapters in the request's folder: --set model.path or, without it,
/// the one in adapter_config.json.
fs::path base_of(const EvaluationRequest& request) {
  constexpr std::string_view kSetting = "model.path=";
  for (const std::string& setting : request.overrides) {
    if (setting.starts_with(kSetting)) return setting.substr(kSetting.size());
  }
  try {
    return formats::base_of_adapters(request.path);
  } catch (const Error& error) {
    throw Error(ErrorCategory::config,
                fmt::format("{}, or name it with --set model.path=DIR", error.what()));
  }
}

/// Returns the config of a Hugging Face folder, or of PEFT adapters over one. Refuses other folders
/// and files of weights.
config::Config read_folder(const EvaluationRequest& request, std::vector<std::string> overrides) {
  const bool adapters = has_only_adapters(request.path);
  const fs::path model = adapters ? base_of(request) : request.path;
  if (const auto cause = config::explain_no_model(model, model.string())) {
    throw Error(ErrorCategory::config, *cause);
  }
  if (request.data.empty()) {
    throw Error(
        ErrorCategory::usage,
        fmt::format("{} is a model folder; name the data with --data FILE", request.path.string()));
  }
  Json config = Json::object();
  config["model"]["path"] = fs::absolute(model).string();
  config["data"] = Json::object();
  config["train_batch_size"] = "auto";
  config["train_micro_batch_size_per_gpu"] = "auto";
  config["zero_optimization"]["offload_param"]["device"] = "auto";
  if (adapters) {
    config["ballast"]["train"] = "adapters";
    config["ballast"]["adapters"]["path"] = fs::absolute(request.path).string();
  }
  if (request.sequence_length == 0) config["data"]["sequence_length"] = usual_length(model);
  return config::parse(config.pretty(), fs::current_path(), request.path.string(), overrides);
}

}  // namespace

config::Config read_evaluation(const EvaluationRequest& request) {
  std::vector<std::string> overrides = evaluation_data_overrides(request.data);
  if (request.sequence_length > 0) {
    overrides.push_back(fmt::format("data.sequence_length={}", request.sequence_length));
  }
  std::error_code ignored;
  const bool folder = fs::is_directory(request.path, ignored);
  const std::string end = request.path.extension().string();
  const bool weights_file = fs::is_regular_file(request.path, ignored) &&
                            (end == ".gguf" || end == ".safetensors" || end == ".bin");
  const fs::path weights = folder ? formats::weights_at(request.path) : request.path;
  const bool run = weights != request.path;
  if (run) {
    overrides.push_back(fmt::format(
        "{}={}", formats::is_adapter_folder(weights) ? "ballast.adapters.path" : "model.weights",
        Json(fs::absolute(weights).string()).compact()));
  }
  overrides.insert(overrides.end(), request.overrides.begin(), request.overrides.end());
  if (run) return config::load(request.path / "config.json", overrides, kAnyWorld);
  return folder || weights_file ? read_folder(request, std::move(overrides))
                                : config::load(request.path, overrides, kAnyWorld);
}

ModelEvaluation evaluate_model(const config::Config& config,
                               const ModelEvaluationProgress& progress,
                               const std::atomic<bool>* interrupted) {
  setup::check_device(config);
  check_initial_weights(config);
  const auto source = data::open_evaluation_data(config);
  if (source->size() == 0) {
    const config::DataSection& data = config.data;
    throw Error(
        ErrorCategory::data,
        fmt::format("there is nothing to evaluate: {} too short for a sequence of {} tokens "
                    "and the target after it; give more with --data, or a smaller "
                    "--sequence-length",
                    data.eval.empty()
                        ? fmt::format("the held-out part of data.{} is", data.kind())
                        : data.eval.front() + (data.eval.size() > 1 ? ", ... are" : " is"),
                    data.sequence_length));
  }
  engine::Blueprint blueprint = setup::draw_evaluation(config);
  const RunFolders folders(config, blueprint, nullptr);
  const data::EvaluationBatches batches(source, blueprint.shape.sequences, blueprint.shape.length);
  engine::Engine engine(std::move(blueprint), setup::engine_options(config), interrupted);
  start_from_weights(engine, config,
                     [&](Bytes done, Bytes total) { progress("reading weights", done, total); });
  const auto start = std::chrono::steady_clock::now();
  const auto found = evaluate(
      engine, batches, batches.size(),
      [&](std::uint64_t done, std::uint64_t total) { progress("evaluating", done, total); });
  if (!found) {
    throw Error(ErrorCategory::data,
                fmt::format("there is nothing to evaluate: no token of {} is trained on (tensor "
                            "'mask' is 0); give other data with --data",
                            config.data.eval.empty()
                                ? fmt::format("the held-out part of data.{}", config.data.kind())
                                : "data.eval"));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const auto allocated = engine.totals().allocated;
  return {.loss = found->loss,
          .targets = found->targets,
          .sequences = source->size(),
          .seconds = seconds.count(),
          .device = describe_devices(engine),
          .placement = engine::describe_placement(engine.blueprint()),
          .allocated = {allocated.begin(), allocated.end()}};
}

}  // namespace ballast::train
