#include "src/train/imported_files.h"

#include <system_error>
#include <utility>

#include "ballast/config/checkpoint_config.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/text/json.h"

#include "src/formats/exported_files.h"
#include "src/train/used_directory.h"

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

}  // namespace ballast::train
