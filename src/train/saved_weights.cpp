#include "src/train/saved_weights.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/formats/exported_files.h"
#include "src/formats/folder_layout.h"
#include "src/train/run_directory.h"

namespace ballast::train {

namespace {

namespace fs = std::filesystem;
using text::Json;

/// The config.json in `folder`; null if there is none.
Json description_in(const fs::path& folder) {
  const fs::path file = folder / config::kCheckpointConfig;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  return text::parse_json(formats::read_small_file(file), file.string(),
                          {.category = ErrorCategory::data, .comments = true});
}

/// Whether `folder` has the weights that a run has saved, in types of training instead of storage.
bool is_of_run(const fs::path& folder) {
  std::error_code ignored;
  return folder.filename() == formats::kRunWeights &&
         fs::exists(folder.parent_path() / kRun, ignored);
}

/// Whether the run writes values of the tensor. Buffers may be moved without being trained.
bool is_written(const model::TensorSpec& tensor) {
  return !tensor.frozen || tensor.buffer;
}

/// Whether the codes at `place` can be saved next to weights that are not quantised.
bool has_codes_to_copy(const formats::WeightPlace& place) {
  return place.quantized != nullptr && formats::is_written(place.quantized->format);
}

}  // namespace

ImportedFiles::ImportedFiles(const config::Config& config, const model::Architecture& model) {
  if (config.initial_weights.empty() || model.adapters) return;
  files_.emplace(config.initial_weights);
  stored_.emplace(*files_);
  find_trained(model);
  find_copied();
  record_layout(model);
}

void ImportedFiles::find_trained(const model::Architecture& model) {
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      const formats::WeightPlace* const place = files_->find(tensor.name);
      if (place == nullptr) continue;
      const bool other_codes = place->quantized != nullptr && !has_codes_to_copy(*place);
      if (is_written(tensor) || other_codes) written_.insert(&place->whole());
    }
  }
  // A tied output matrix is a copy of the embedding.
  if (model.config.tie_embeddings) {
    if (const auto* const place = files_->find(model.outer.output)) written_.insert(place);
  }
}

void ImportedFiles::find_copied() {
  for (const formats::WeightPlace& place : files_->tensors()) {
    const std::string& name = place.tensor->name;
    if (written_.contains(&place)) {
      if (place.quantized != nullptr) dequantized_.push_back(name);
      continue;
    }
    if (place.quantized == nullptr) {
      copied_.push_back(formats::copy_of_bytes(*stored_->find(name)));
      continue;
    }
    if (!has_codes_to_copy(place)) {
      copied_.push_back(
          {.stored = {name, formats::type_of(place), place.tensor->shape}, .source = &place});
      continue;
    }
    codes_.push_back(name);
    for (const auto* const part : {&place.quantized->codes, &place.quantized->scales}) {
      copied_.push_back(formats::copy_of_bytes(*stored_->find(part->tensor->name)));
    }
  }
}

void ImportedFiles::record_layout(const model::Architecture& model) {
  const fs::path folder = files_->path().parent_path();
  layout_ = formats::recorded_layout(folder);
  if (layout_ || is_of_run(folder)) return;
  layout_ = formats::layout_of(*files_, description_in(folder));
  const formats::WeightPlace* const output = files_->find(model.outer.output);
  if (!model.config.tie_embeddings || output == nullptr) return;
  for (formats::FolderLayout::File& file : layout_->files) {
    for (formats::FolderLayout::Tensor& tensor : file.tensors) {
      if (tensor.name == output->tensor->name) tensor.copy_of = name_of(model.outer.tokens);
    }
  }
}

/// The name of the model's tensor `name` in the files; `name` if they do not have it.
std::string ImportedFiles::name_of(const std::string& name) const {
  const formats::WeightPlace* const place = files_ ? files_->find(name) : nullptr;
  return place == nullptr ? name : place->tensor->name;
}

ImportedFiles::Target ImportedFiles::target_of(const model::TensorSpec& tensor) const {
  const formats::WeightPlace* const place = files_ ? files_->find(tensor.name) : nullptr;
  if (place == nullptr || place->stack == nullptr) {
    return {name_of(tensor.name), tensor.whole_shape()};
  }
  const formats::StoredTensor& stack = *place->stack->tensor;
  return {stack.name, stack.shape, place->first_in_whole()};
}

bool ImportedFiles::copies(const model::TensorSpec& tensor) const {
  const formats::WeightPlace* const place = files_ ? files_->find(tensor.name) : nullptr;
  return place != nullptr && !written_.contains(&place->whole());
}

Bytes ImportedFiles::copied_bytes() const {
  Bytes sum = 0;
  for (const formats::CopiedTensor& tensor : copied_) sum += bytes_of(tensor.stored);
  return sum;
}

std::string ImportedFiles::describe(const std::string& text) const {
  const Json quantization = layout_ ? layout_->quantization : Json();
  return formats::describe_codes(text, quantization, codes_, dequantized_);
}

void ImportedFiles::copy(formats::ModelFolderWriter& writer,
                         const std::function<void(Bytes done)>& progress) const {
  if (!copied_.empty()) formats::copy_tensors(*files_, nullptr, {copied_}, writer, progress);
}

namespace {

namespace fs = std::filesystem;

/// A model with adapters saves only its trained tensors.
bool is_saved(const model::Architecture& model, const model::TensorSpec& tensor) {
  return !model.adapters || !tensor.frozen;
}

/// Size of the tensors that are written as F32.
Bytes size_of_values(const model::Architecture& model, const ImportedFiles& imported) {
  Elems elements = 0;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (is_saved(model, tensor) && !imported.copies(tensor)) elements += tensor.size;
    }
  }
  return elements * sizeof(float);
}

/// Returns the Hugging Face folder that `config` imports; empty if it has no config.json.
std::optional<fs::path> imported_folder(const config::Config& config) {
  const fs::path& path = config.initial_weights;
  std::error_code ignored;
  const fs::path folder = fs::is_directory(path, ignored) ? path : path.parent_path();
  const fs::path file = folder / config::kCheckpointConfig;
  const auto keys = model::family(config.model.family).checkpoint_keys();
  if (path.empty() || keys.empty() || !fs::exists(file, ignored)) return std::nullopt;
  const text::Json json =
      text::parse_json(formats::read_small_file(file), file.string(), {.comments = true});
  // The file may be a config of Ballast.
  return json.find(keys.front().name) == nullptr ? std::nullopt : std::optional(folder);
}

/// Returns the beginning of the names of modules in the class of the imported folder.
std::string module_prefix_of(const config::Config& config) {
  const auto folder = imported_folder(config);
  if (!folder) return config::kModulePrefix;
  const fs::path file = *folder / config::kCheckpointConfig;
  const text::Json json =
      text::parse_json(formats::read_small_file(file), file.string(), {.comments = true});
  return config::module_prefix(json, file);
}

/// Writes one of several stacked tensors whose elements have another order in files, some rows of
/// the file's matrix at a time.
void write_slice(formats::ModelFolderWriter& writer, const std::string& name,
                 const model::TensorSpec& tensor, std::span<const float> values) {
  constexpr Elems kAtATime = 16;  // values per cache line
  const Elems rows = tensor.shape.front();
  const Elems columns = tensor.size / rows;
  std::vector<float> strip;
  for (Elems first = 0; first < columns; first += kAtATime) {
    const Elems count = std::min(kAtATime, columns - first);
    strip.resize(count * rows);
    for (Elems row = 0; row < rows; ++row) {
      const Elems there = model::run_in_files(tensor, row * columns).first - tensor.first_element();
      const float* const from = values.data() + row * columns + first;
      for (Elems i = 0; i < count; ++i) strip[i * rows + there] = from[i];
    }
    writer.write(name, strip, tensor.first_element() + first * rows);
  }
}

/// Writes in file order, which is fast even if memory has another order. `before`: values of the
/// file's tensor before those of `tensor`.
void write(formats::ModelFolderWriter& writer, const std::string& name,
           const model::TensorSpec& tensor, std::span<const float> values, Elems before = 0) {
  const bool reordered = model::run_in_files(tensor, 0).count < tensor.size;
  if (tensor.stored.stacked > 0 && reordered) return write_slice(writer, name, tensor, values);
  if (tensor.stored.addends > 1) {
    return writer.write(name, model::sum_of_addends(tensor, values), 0);
  }
  for (Elems done = 0; done < tensor.size;) {
    const model::TensorRun from = model::run_in_memory(tensor, done);
    const model::TensorRun to = model::run_in_files(tensor, from.first);
    const Elems count = std::min(from.count, to.count);
    writer.write(name, values.subspan(from.first, count), before + to.first);
    done += count;
  }
}

/// Returns the folder of the adapters' base model, if it has the usual names.
fs::path base_model(const config::Config& config) {
  const fs::path& path = config.initial_weights;
  const std::string name = path.filename().string();
  return name == formats::kSingleWeights || name == formats::kWeightsIndex ? path.parent_path()
                                                                           : path;
}

void describe(formats::ModelFolderWriter& writer, const config::Config& config,
              const model::Architecture& model, const ImportedFiles& imported) {
  if (model.adapters) {
    const auto json =
        config::make_adapter_config(model, base_model(config), module_prefix_of(config));
    writer.add(config::kAdapterConfig, json.pretty() + "\n");
  } else if (const auto from = imported_folder(config)) {
    const std::string text = formats::read_small_file(*from / config::kCheckpointConfig);
    writer.add(config::kCheckpointConfig, imported.describe(text));
    writer.carry(*from);
  } else {
    writer.add(config::kCheckpointConfig, config::make_checkpoint_config(config).pretty() + "\n");
  }
}

std::string adapter_name(const model::TensorSpec& tensor, const std::string& prefix) {
  const std::string& name = tensor.name_in_files.empty() ? tensor.name : tensor.name_in_files;
  return config::kAdapterPrefix + config::name_in_class(name, prefix);
}

/// Collects tensors whose columns alternate with those of other experts in files. Keeps the values
/// of the file's tensors until those of all experts are there, for at most one layer.
class AlternatingColumns {
 public:
  void write(formats::ModelFolderWriter& writer, const std::string& name,
             const model::TensorSpec& tensor, std::span<const float> values) {
    Whole& whole = wholes_[name];
    whole.values.resize(tensor.shape.front() * tensor.columns_in_all);
    for (Elems i = 0; i < tensor.size; ++i) {
      whole.values[model::run_in_files(tensor, i).first] = values[i];
    }
    if (++whole.experts < tensor.stored.column_step) return;
    writer.write(name, whole.values, 0);
    wholes_.erase(name);
  }

 private:
  struct Whole {
    std::vector<float> values;
    std::uint64_t experts = 0;  ///< number of experts whose columns are there
  };
  std::map<std::string, Whole> wholes_;
};

std::vector<formats::TensorToStore> adapters_of(const model::Architecture& model,
                                                const std::string& prefix) {
  std::vector<formats::TensorToStore> tensors;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!is_saved(model, tensor) || tensor.first_element() > 0) continue;
      tensors.push_back({adapter_name(tensor, prefix), DType::f32, tensor.whole_shape()});
    }
  }
  return tensors;
}

}  // namespace

void check_room_for_weights(const config::Config& config, const model::Architecture& model) {
  std::error_code error;
  const fs::space_info space = fs::space(config.ballast.out, error);
  const ImportedFiles imported(config, model);
  const Bytes needed = size_of_values(model, imported) + imported.copied_bytes();
  if (error || space.available >= needed) return;
  throw Error(
      ErrorCategory::io,
      fmt::format("ballast.save_weights: {} has {} free, but the weights take {} at the end "
                  "of the run; make room, choose another run directory with --out, or set "
                  "it to false",
                  config.ballast.out.string(), format_bytes(space.available),
                  format_bytes(needed)));
}

std::vector<formats::TensorToStore> tensors_of(const model::Architecture& model) {
  std::vector<formats::TensorToStore> tensors;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.first_element() > 0) continue;  // another block has the beginning of this tensor
      tensors.push_back({tensor.name, DType::f32, tensor.whole_shape()});
    }
  }
  return tensors;
}

void write_block(formats::ModelFolderWriter& writer, const model::BlockSpec& block,
                 std::span<const float> values) {
  for (const model::TensorSpec& tensor : block.tensors) {
    write(writer, tensor.name, tensor, values.subspan(tensor.offset, tensor.size));
  }
}

namespace {

/// The files of the saved weights.
std::vector<formats::FolderFile> files_of(const model::Architecture& model,
                                          const ImportedFiles& imported,
                                          const std::string& prefix) {
  if (model.adapters) {
    return formats::name_files({adapters_of(model, prefix)}, config::kAdapterWeights);
  }
  std::vector<formats::TensorToStore> tensors;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.first_element() > 0 || imported.copies(tensor)) continue;
      ImportedFiles::Target target = imported.target_of(tensor);
      if (target.first > 0) continue;
      tensors.push_back({std::move(target.name), DType::f32, std::move(target.shape)});
    }
  }
  for (const formats::CopiedTensor& copied : imported.copied()) tensors.push_back(copied.stored);
  return formats::name_files(formats::split_into_files(std::move(tensors), formats::kShardSize));
}

}  // namespace

bool has_saved_weights(const config::Config& config, comm::Ranks* ranks) {
  std::error_code ignored;
  return comm::decided_by_root(ranks,
                               fs::exists(config.ballast.out / formats::kRunWeights, ignored));
}

void save_weights(engine::Engine& engine, const config::Config& config, bool first,
                  const Progress& progress) {
  const model::Architecture& model = engine.blueprint().model;
  const ImportedFiles imported(config, model);
  const std::string prefix = module_prefix_of(config);
  const Bytes total = size_of_values(model, imported) + imported.copied_bytes();
  std::optional<formats::ModelFolderWriter> writer;
  if (first) {
    writer.emplace(config.ballast.out / formats::kRunWeights, files_of(model, imported, prefix));
  }
  Bytes done = 0;
  AlternatingColumns columns;
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    if (first) progress(done, total);
    const model::BlockSpec& block = model.blocks[b];
    const auto is_written = [&](const model::TensorSpec& tensor) {
      return is_saved(model, tensor) && !imported.copies(tensor);
    };
    if (std::none_of(block.tensors.begin(), block.tensors.end(), is_written)) continue;
    const std::vector<float> values = engine.snapshot().read_block(b);
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!is_written(tensor)) continue;
      done += tensor.size * sizeof(float);
      if (!writer) continue;
      ImportedFiles::Target target = imported.target_of(tensor);
      if (model.adapters) target.name = adapter_name(tensor, prefix);
      const auto own = std::span(values).subspan(tensor.offset, tensor.size);
      if (tensor.stored.column_step > 1) {
        columns.write(*writer, target.name, tensor, own);
      } else {
        write(*writer, target.name, tensor, own, target.first);
      }
    }
  }
  if (!writer) return;
  imported.copy(*writer, [&](Bytes copied) { progress(done + copied, total); });
  describe(*writer, config, model, imported);
  if (imported.layout()) writer->add(formats::kImportedLayout, to_text(*imported.layout()));
  writer->finish();
}

}  // namespace ballast::train
