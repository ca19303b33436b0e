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
#include "ballast/core/convert.h"
#include "ballast/core/error.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

#include "src/formats/adapter_files.h"
#include "src/formats/merged_adapters.h"
#include "src/formats/mxfp4.h"
#include "src/formats/safetensors_header.h"
#include "src/formats/weight_reader.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;
using text::Json;

bool is_run(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path / "run.json", ignored) && fs::exists(path / "metrics.jsonl", ignored);
}

/// The config.json of the model, and the type that it names.
struct Description {
  explicit Description(const fs::path& folder)
      : path(folder / config::kCheckpointConfig),
        text(read_small_file(path)),
        json(text::parse_json(text, path.string(), {.category = ErrorCategory::data})) {
    for (const char* name : {"dtype", "torch_dtype"}) {
      if (json.find(name) != nullptr) key = name;
    }
    const Json* const named = json.find(key);
    for (const DType known : {DType::bf16, DType::f16}) {
      if (named != nullptr && *named == config::torch_name(known)) type = known;
    }
  }

  /// The text for weights of type `other`; unchanged if it names that type.
  [[nodiscard]] std::string with(DType other) const {
    const Json* const named = json.find(key);
    if (named != nullptr && *named == config::torch_name(other)) return text;
    Json changed = json;
    changed[key] = config::torch_name(other);
    return changed.pretty() + "\n";
  }

  void set(const std::string& name, const Json& value) {
    json[name] = value;
    text = json.pretty() + "\n";
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
  const auto add = [&](const std::string& name, const WeightPlace& place) {
    tensors.push_back({name, type.value_or(type_of(place)), place.tensor->shape});
  };
  for (const WeightPlace& place : weights.tensors()) add(place.tensor->name, place);
  if (merged != nullptr && merged->added()) add(merged->added()->name, *merged->added()->like);
  auto files = split_into_files(std::move(tensors), shard_size);
  for (auto& file : files) {
    std::stable_partition(file.begin(), file.end(), [](const TensorToStore& tensor) {
      Elems elements = 0;
      count_elements(tensor.shape, elements);
      return elements * size_of(tensor.dtype) % kPage == 0;
    });
  }
  return files;
}

ExportSummary count(const std::vector<std::vector<TensorToStore>>& files) {
  ExportSummary summary = {.files = files.size()};
  for (const auto& file : files) {
    Bytes at = 0;
    for (const TensorToStore& tensor : file) {
      Elems elements = 0;
      count_elements(tensor.shape, elements);
      ++summary.tensors;
      if (at % kPage == 0) ++summary.aligned;
      at += elements * size_of(tensor.dtype);
    }
    summary.bytes += at;
  }
  return summary;
}

/// Whether the tensor is read by slices.
bool is_sliced(const WeightPlace& place) {
  return place.quantized != nullptr && place.quantized->format == QuantizedWeights::Format::mxfp4;
}

/// Copies a stack of matrices in MXFP4, some columns of one matrix at a time.
void copy_decoded(const WeightPlace& from, ReadAhead& reader, const TensorToStore& tensor,
                  ModelFolderWriter& writer, const std::function<void(Elems values)>& count) {
  const std::vector<std::uint64_t>& shape = from.tensor->shape;
  std::vector<float> values;
  for (std::uint64_t index = 0; index < shape[0]; ++index) {
    const StoredSlice slice(from, index, reader);
    for (Elems column = 0; column < shape[1]; column += mxfp4::kBlock) {
      const std::vector<Bf16> dequantized = slice.dequantized_columns(column, mxfp4::kBlock);
      const auto bytes = std::as_bytes(std::span(dequantized));
      const Elems first = (index * shape[1] + column) * shape[2];
      count(dequantized.size());
      if (tensor.dtype == DType::bf16) {
        writer.write_stored(tensor.name, bytes, DType::bf16, first);
        continue;
      }
      values.resize(dequantized.size());
      decode(bytes, DType::bf16, values);
      writer.write(tensor.name, values, first);
    }
  }
}

/// Reads ahead, converts and writes in the background, in pieces that stay in a cache. `merged`
/// changes the weights; null: nothing does.
void copy(const WeightFiles& weights, MergedAdapters* merged,
          const std::vector<std::vector<TensorToStore>>& files, ModelFolderWriter& writer,
          const std::function<void(Bytes done)>& progress) {
  constexpr Elems kAtATime = Elems{1} << 15;
  constexpr Elems kMergedAtATime = Elems{1} << 18;  // enough for many threads
  const auto source = [&](const TensorToStore& tensor) {
    return merged == nullptr ? weights.find(tensor.name) : merged->source(tensor.name);
  };
  std::vector<ReadAhead::Source> order;
  for (const auto& file : files) {
    for (const TensorToStore& tensor : file) {
      const WeightPlace* const place = source(tensor);
      const Elems all = place->tensor->elements;
      const Elems part = is_sliced(*place) ? all / tensor.shape.front() : all;
      for (Elems first = 0; first < all; first += part) {
        const auto ranges = stored_ranges(*place, first, first + part);
        order.insert(order.end(), ranges.begin(), ranges.end());
      }
    }
  }
  ReadAhead reader(weights.files(), order);
  std::vector<std::byte> stored;
  std::vector<float> values;
  Bytes done = 0;
  for (const auto& file : files) {
    for (const TensorToStore& tensor : file) {
      const WeightPlace& from = *source(tensor);
      if (is_sliced(from)) {
        copy_decoded(from, reader, tensor, writer, [&](Elems count) {
          progress(done);
          done += count * size_of(tensor.dtype);
        });
        continue;
      }
      const DType type = type_of(from);
      const bool changed = merged != nullptr && merged->changes(tensor.name);
      for (Elems first = 0; first < from.tensor->elements; first += values.size()) {
        progress(done);
        values.resize(std::min(changed ? kMergedAtATime : kAtATime, from.tensor->elements - first));
        stored.resize(values.size() * size_of(type));
        read_elements(from, first, stored, &reader);
        if (type == tensor.dtype && !changed) {
          writer.write_stored(tensor.name, stored, type, first);
        } else {
          decode(stored, type, values);
          if (changed) merged->apply(tensor.name, first, values);
          writer.write(tensor.name, values, first);
        }
        done += values.size() * size_of(tensor.dtype);
      }
    }
  }
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
  copy(weights, nullptr, files, writer, [&](Bytes done) { progress(done, summary.bytes); });
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
  copy(weights, merged ? &*merged : nullptr, files, writer,
       [&](Bytes done) { progress(done, summary.bytes); });
  writer.add(config::kCheckpointConfig,
             config::of_decoded_weights(type ? description.with(*type) : description.text));
  writer.carry(folder);
  writer.finish();
  return summary;
}

}  // namespace ballast::formats
