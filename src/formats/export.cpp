#include "ballast/formats/export.h"

#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

#include "src/formats/adapter_files.h"
#include "src/formats/copied_tensors.h"
#include "src/formats/exported_files.h"
#include "src/formats/folder_layout.h"

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

ExportSummary count(const ExportedFiles& files) {
  ExportSummary summary = {.files = files.tensors().size()};
  for (const auto& file : files.tensors()) {
    Bytes at = 0;
    for (const CopiedTensor& tensor : file) {
      ++summary.tensors;
      if (at % kPage == 0) ++summary.aligned;
      at += bytes_of(tensor.stored);
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

/// Copies all tensors; `writer` is one of `files`.
ExportSummary write(const WeightFiles& weights, MergedAdapters* merged, const ExportedFiles& files,
                    ModelFolderWriter& writer, const ShowProgress& progress) {
  ExportSummary summary = count(files);
  const CodesError error = copy_tensors(weights, merged, files.tensors(), writer,
                                        [&](Bytes done) { progress(done, summary.bytes); });
  summary.quantized = {error.tensors, error.largest, error.relative_rms()};
  return summary;
}

/// The modules with adapters in a PEFT folder.
std::vector<std::string> adapted_modules(const WeightFiles& weights) {
  constexpr std::string_view kEnd = model::kFirstOfAdapter;
  std::vector<std::string> modules;
  for (const WeightPlace& place : weights.tensors()) {
    std::string_view name = place.tensor->name;
    if (!name.starts_with(config::kAdapterPrefix) || !name.ends_with(kEnd)) continue;
    name.remove_prefix(std::string_view(config::kAdapterPrefix).size());
    name.remove_suffix(kEnd.size());
    modules.emplace_back(name);
  }
  return modules;
}

/// Exports adapters without merging.
ExportSummary export_adapters(const fs::path& folder, const fs::path& out,
                              const ExportOptions& options, const ShowProgress& progress) {
  const WeightFiles weights(adapter_weights(folder));
  FolderLayout layout = layout_of(weights, {});
  layout.files.front().name = config::kAdapterWeights;
  const ExportedFiles files(weights, nullptr, std::move(layout), {.type = options.type});
  ModelFolderWriter writer(out, files.files(), std::nullopt);
  ExportSummary summary = write(weights, nullptr, files, writer, progress);
  auto [text, note] = config::respell_adapters(read_small_file(folder / config::kAdapterConfig),
                                               adapted_modules(weights));
  writer.add(config::kAdapterConfig, text);
  summary.note = std::move(note);
  writer.finish();
  return summary;
}

/// Refuses options that do not fit the model.
void check_options(const fs::path& from, const fs::path& found, bool adapters,
                   const ExportOptions& options) {
  if (options.merged && !adapters) {
    const std::string below = adapter_folder_below(found);
    throw Error(ErrorCategory::usage,
                fmt::format("--merged: {} has no adapters; {}", from.string(),
                            below.empty() ? "leave it out"
                                          : fmt::format("its folder {} has: give that", below)));
  }
  if (options.codes && options.type) {
    throw Error(ErrorCategory::usage,
                "--codes writes the stored form of the imported folder, --dtype another one; give "
                "one of them");
  }
  if (options.codes && adapters && !options.merged) {
    throw Error(ErrorCategory::usage, "--codes is for models; adapters are not quantised");
  }
}

/// Refuses to quantise weights if the folder had none that Ballast can write.
void check_codes(const FolderLayout& layout, const fs::path& from) {
  for (const FolderLayout::File& file : layout.files) {
    for (const FolderLayout::Tensor& tensor : file.tensors) {
      const bool codes = tensor.role == FolderLayout::Role::codes;
      if (codes && is_written(tensor.codes.format)) return;
    }
  }
  throw Error(
      ErrorCategory::usage,
      fmt::format("--codes: {} was not imported from a folder in MXFP4 or block-scaled FP8; "
                  "leave it out",
                  from.string()));
}

/// The layout and the rules of an export.
struct Form {
  FolderLayout layout;
  ExportRules rules;
};

Form form_of(const WeightFiles& weights, const Description& description, bool of_run,
             const ExportOptions& options) {
  const ExportRules rules = {options.type, options.codes, options.shard_size};
  if (auto recorded = recorded_layout(description.path.parent_path())) {
    return {std::move(*recorded), rules};
  }
  Form form = {layout_of(weights, description.json), rules};
  // The weights of a run are in fp32.
  if (of_run && !form.rules.type) form.rules.type = description.type;
  if (of_run && !form.rules.shard_size) form.rules.shard_size = kShardSize;
  return form;
}

}  // namespace

ExportSummary export_model(const fs::path& from, const fs::path& out, const ExportOptions& options,
                           const ShowProgress& progress) {
  const fs::path found = weights_at(from);
  const bool adapters = is_adapter_folder(found);
  check_options(from, found, adapters, options);
  if (adapters && !options.merged) return export_adapters(found, out, options, progress);
  const WeightFiles weights(adapters ? weights_at(base_of_adapters(found)) : found);
  const fs::path folder = weights.path().parent_path();
  Description description(folder);
  std::optional<MergedAdapters> merged;
  if (adapters) merged.emplace(weights, found, description.json);
  if (merged && merged->unties()) description.set("tie_word_embeddings", false);
  MergedAdapters* const changes = merged ? &*merged : nullptr;
  const Form form = form_of(weights, description, is_run(from) && !adapters, options);
  if (options.codes) check_codes(form.layout, from);
  const ExportedFiles files(weights, changes, form.layout, form.rules);
  ModelFolderWriter writer(out, files.files(), files.index());
  const ExportSummary summary = write(weights, changes, files, writer, progress);
  const std::string text = form.rules.type ? description.with(*form.rules.type) : description.text;
  writer.add(config::kCheckpointConfig,
             describe_codes(text, form.layout.quantization, files.codes(), files.dequantized()));
  writer.carry(folder);
  writer.finish();
  return summary;
}

}  // namespace ballast::formats
