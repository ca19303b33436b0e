#include "ballast/formats/export.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/checkpoint_config.h"
#include "ballast/config/model_source.h"
#include "ballast/core/error.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

#include "src/formats/adapter_files.h"
#include "src/formats/copied_tensors.h"
#include "src/formats/merged_adapters.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;
using text::Json;

bool is_run(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path / "run.json", ignored) && fs::exists(path / "metrics.jsonl", ignored);
}

/// The text model's part of the config.json of a model of text and images.
constexpr const char* kTextConfig = "text_config";

/// The config.json of the model, and the type that it names.
struct Description {
  explicit Description(const fs::path& folder)
      : path(folder / config::kCheckpointConfig),
        text(read_small_file(path)),
        json(text::parse_json(text, path.string(), {.category = ErrorCategory::data})) {
    const Json* const inner = json.find(kTextConfig);
    for (const char* name : {"dtype", "torch_dtype"}) {
      if (json.find(name) != nullptr || (inner != nullptr && inner->find(name) != nullptr)) {
        key = name;
      }
    }
    const Json* named = json.find(key);
    if (named == nullptr && inner != nullptr) named = inner->find(key);
    for (const DType known : {DType::bf16, DType::f16}) {
      if (named != nullptr && *named == config::torch_name(known)) type = known;
    }
  }

  /// The text for weights of type `other`; unchanged if it names that type.
  [[nodiscard]] std::string with(DType other) const {
    const Json* const named = json.find(key);
    if (named != nullptr && *named == config::torch_name(other)) return text;
    Json changed = json;
    set(changed, key, config::torch_name(other));
    return changed.pretty() + "\n";
  }

  void set(const std::string& name, const Json& value) {
    set(json, name, value);
    text = json.pretty() + "\n";
  }

  /// Also sets the key in text_config, if it is there.
  static void set(Json& whole, const std::string& name, const Json& value) {
    whole[name] = value;
    Json* const inner = whole.find(kTextConfig);
    if (inner != nullptr && inner->find(name) != nullptr) (*inner)[name] = value;
  }

  fs::path path;
  std::string text;
  Json json;
  std::string key = "torch_dtype";
  DType type = DType::f32;
};

/// Divides the tensors into files. Tensors that fill whole pages come first, so that all of these
/// start at a page, since the format allows no gaps.
std::vector<std::vector<TensorToStore>> arrange(const WeightFiles& weights,
                                                const MergedAdapters* merged,
                                                std::optional<DType> type, Bytes shard_size) {
  std::vector<TensorToStore> tensors;
  const auto add_changed = [&](const std::string& name, const WeightPlace& place) {
    tensors.push_back({name, type.value_or(type_of(place)), place.tensor->shape});
  };
  for (const WeightPlace& place : weights.tensors()) {
    const std::string& name = place.tensor->name;
    if (merged != nullptr && merged->changes(name)) {
      add_changed(name, place);
    } else {
      tensors.push_back(copy_of(weights, place, type));
    }
  }
  if (merged != nullptr && merged->added()) {
    add_changed(merged->added()->name, *merged->added()->like);
  }
  auto files = split_into_files(std::move(tensors), shard_size);
  for (auto& file : files) {
    std::stable_partition(file.begin(), file.end(), [](const TensorToStore& tensor) {
      return bytes_of(tensor) % kPage == 0;
    });
  }
  return files;
}

ExportSummary count(const std::vector<std::vector<TensorToStore>>& files) {
  ExportSummary summary = {.files = files.size()};
  for (const auto& file : files) {
    Bytes at = 0;
    for (const TensorToStore& tensor : file) {
      ++summary.tensors;
      if (at % kPage == 0) ++summary.aligned;
      at += bytes_of(tensor);
    }
    summary.bytes += at;
  }
  return summary;
}

}  // namespace

fs::path weights_at(const fs::path& path) {
  std::error_code ignored;
  const std::string hint = config::download_hint(path.string());
  if (!hint.empty() && !fs::exists(path, ignored)) {
    throw Error(ErrorCategory::data,
                fmt::format("{}: no such file or folder. {}", path.string(), hint));
  }
  if (!is_run(path)) return path;
  if (fs::is_directory(path / kRunWeights, ignored)) return path / kRunWeights;
  throw Error(
      ErrorCategory::data,
      fmt::format("{} is a run without weights: it did not end, or ballast.save_weights was false",
                  path.string()));
}

namespace {

using ShowProgress = std::function<void(Bytes done, Bytes total)>;

/// Exports adapters without merging.
ExportSummary export_adapters(const fs::path& folder, const fs::path& out,
                              const ExportOptions& options, const ShowProgress& progress) {
  const WeightFiles weights(adapter_weights(folder));
  const auto files = arrange(weights, nullptr, options.type, std::numeric_limits<Bytes>::max());
  const ExportSummary summary = count(files);
  ModelFolderWriter writer(out, files, config::kAdapterWeights);
  copy_tensors(weights, nullptr, files, writer, [&](Bytes done) { progress(done, summary.bytes); });
  writer.add(config::kAdapterConfig, read_small_file(folder / config::kAdapterConfig));
  writer.finish();
  return summary;
}

}  // namespace

ExportSummary export_model(const fs::path& from, const fs::path& out, const ExportOptions& options,
                           const ShowProgress& progress) {
  const fs::path found = weights_at(from);
  const bool adapters = is_adapter_folder(found);
  if (adapters && !options.merged) return export_adapters(found, out, options, progress);
  if (options.merged && !adapters) {
    const std::string below = adapter_folder_below(found);
    throw Error(ErrorCategory::usage,
                fmt::format("--merged: {} has no adapters; {}", from.string(),
                            below.empty() ? "leave it out"
                                          : fmt::format("its folder {} has: give that", below)));
  }
  const WeightFiles weights(adapters ? weights_at(base_of_adapters(found)) : found);
  const fs::path folder = weights.path().parent_path();
  Description description(folder);
  std::optional<MergedAdapters> merged;
  if (adapters) merged.emplace(weights, found, description.json);
  if (merged && merged->unties()) description.set("tie_word_embeddings", false);
  std::optional<DType> type = options.type;
  if (!type && is_run(from) && !adapters) type = description.type;
  auto files = arrange(weights, merged ? &*merged : nullptr, type, options.shard_size);
  const ExportSummary summary = count(files);
  ModelFolderWriter writer(out, files);
  copy_tensors(weights, merged ? &*merged : nullptr, files, writer,
               [&](Bytes done) { progress(done, summary.bytes); });
  writer.add(config::kCheckpointConfig,
             config::of_decoded_weights(type ? description.with(*type) : description.text));
  writer.carry(folder);
  writer.finish();
  return summary;
}

}  // namespace ballast::formats
