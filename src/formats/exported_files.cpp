#include "src/formats/exported_files.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"

#include "src/formats/folder_layout.h"
#include "src/formats/quantized_matrices.h"

namespace ballast::formats {
namespace {

using Format = QuantizedWeights::Format;
using Role = FolderLayout::Role;

/// Whether a quantization_config asks for scales that are powers of two.
bool wants_powers_of_two(const text::Json& quantization) {
  const text::Json* const form = quantization.find("scale_fmt");
  return form != nullptr && *form == "ue8m0";
}

/// Whether a tensor can be converted to another type of weights. Whole numbers cannot. transformers
/// reads the corrections of routers in fp32, whatever type weights have.
bool is_convertible(const FolderLayout::Tensor& tensor) {
  const bool is_float = tensor.dtype.starts_with('F') || tensor.dtype.starts_with("BF");
  return is_float && !tensor.name.ends_with("e_score_correction_bias");
}

/// Refuses to quantise in blocks other than those of fp8::encode().
void check_blocks(const FolderLayout::Tensor& codes, const FolderLayout::Tensor& scales) {
  const auto grid = fp8::grid_of(codes.shape, scales.shape);
  const auto is_block = [](Elems block, Elems extent) {
    return block == fp8::kBlock || (block == extent && extent <= fp8::kBlock);
  };
  if (codes.shape.size() == 2 && scales.shape.size() == 2 && grid &&
      is_block(grid->block_rows, grid->rows) && is_block(grid->block_columns, grid->columns)) {
    return;
  }
  throw Error(
      ErrorCategory::usage,
      fmt::format("--codes: '{}' has scales {}, but Ballast quantises FP8 only in blocks of "
                  "{} x {}; leave it out to write trained matrices without codes",
                  text::printable(codes.name), format_shape(scales.shape), fp8::kBlock,
                  fp8::kBlock));
}

/// The module of a weight.
std::string module_of(const std::string& weight) {
  return weight.substr(0, weight.rfind('.'));
}

/// The module of all experts of a layer; "" if the weight belongs to no expert.
std::string experts_of(const std::string& weight) {
  constexpr std::string_view kExperts = ".experts";
  const auto at = weight.find(std::string(kExperts) + ".");
  return at == std::string::npos ? "" : weight.substr(0, at + kExperts.size());
}

}  // namespace

ExportedFiles::ExportedFiles(const WeightFiles& weights, const MergedAdapters* merged,
                             FolderLayout layout, const ExportRules& rules)
    : weights_(weights),
      merged_(merged),
      layout_(std::move(layout)),
      rules_(rules),
      places_(weights) {
  arrange();
  if (rules_.shard_size) divide(*rules_.shard_size);
}

void ExportedFiles::arrange() {
  // Codes decide about their scales, which may come first.
  for (const FolderLayout::File& file : layout_.files) {
    for (const Tensor& tensor : file.tensors) {
      if (tensor.role == Role::scales) scales_.emplace(tensor.name, &tensor);
    }
  }
  for (const FolderLayout::File& file : layout_.files) {
    for (const Tensor& tensor : file.tensors) {
      if (tensor.role != Role::codes) continue;
      const bool copied = is_as_stored(tensor);
      if (copied) copied_.insert(tensor.codes.scales);
      if (!copied && rules_.codes && is_written(tensor.codes.format)) {
        written_.insert(tensor.codes.scales);
      }
      if (copied || written_.contains(tensor.codes.scales)) stay_codes_.insert(tensor.name);
    }
  }
  for (const FolderLayout::File& file : layout_.files) {
    tensors_.emplace_back();
    for (const Tensor& tensor : file.tensors) {
      if (tensor.role == Role::weight && !is_idle_scale(tensor)) add_weight(tensor);
      if (tensor.role == Role::codes) add_codes(tensor);
      if (tensor.role == Role::scales) add_scales(tensor);
      if (tensor.role == Role::description && is_as_stored(tensor)) {
        tensors_.back().push_back(copy_of_bytes(*places_.find(tensor.name)));
      }
    }
  }
  add_merged();
}

bool ExportedFiles::is_changed(const std::string& name) const {
  return merged_ != nullptr && merged_->changes(name);
}

bool ExportedFiles::is_as_stored(const Tensor& tensor) const {
  const WeightPlace* const place = places_.find(tensor.name);
  if (place == nullptr || place->tensor->dtype != tensor.dtype ||
      place->tensor->shape != tensor.shape) {
    return false;
  }
  switch (tensor.role) {
    case Role::weight:
      if (is_changed(tensor.name)) return false;
      return !rules_.type || !is_convertible(tensor) ||
             passing_part(weights_, tensor.name).has_value();
    case Role::codes:
      if (rules_.type || is_changed(tensor.codes.weight)) return false;
      return merged_ == nullptr || is_written(tensor.codes.format);
    case Role::scales:
      return copied_.contains(tensor.name);
    case Role::description:
      break;
  }
  return !rules_.type && merged_ == nullptr;
}

const WeightPlace& ExportedFiles::source_of(const Tensor& tensor, const std::string& name) const {
  const WeightPlace* source = merged_ == nullptr ? weights_.find(name) : merged_->source(name);
  if (source == nullptr && !tensor.copy_of.empty()) source = weights_.find(tensor.copy_of);
  if (source != nullptr) return *source;
  throw Error(ErrorCategory::data,
              fmt::format("{}: has no tensor '{}', which {} lists; remove {} to export the weights "
                          "without it",
                          weights_.path().string(), text::printable(name), kImportedLayout,
                          kImportedLayout));
}

CopiedTensor ExportedFiles::values_of(const std::string& name, const WeightPlace& source,
                                      DType type) const {
  type_of(source);  // throws for values that are not weights
  return {.stored = {name, rules_.type.value_or(type), source.tensor->shape},
          .source = &source,
          .merged = is_changed(name) ? name : ""};
}

bool ExportedFiles::is_idle_scale(const Tensor& tensor) const {
  const std::string weight = fp8::scaled_by(tensor.name);
  return !weight.empty() && !stay_codes_.contains(weight) &&
         passing_part(weights_, tensor.name) == PassingPart::activation_scales;
}

void ExportedFiles::add_weight(const Tensor& tensor) {
  if (is_as_stored(tensor)) {
    tensors_.back().push_back(copy_of_bytes(*places_.find(tensor.name)));
    return;
  }
  const WeightPlace& source = source_of(tensor, tensor.name);
  const auto type = weight_type(tensor.dtype);
  CopiedTensor values = values_of(tensor.name, source, type ? *type : type_of(source));
  if (type && !is_convertible(tensor)) values.stored.dtype = *type;
  tensors_.back().push_back(std::move(values));
}

EncodedTensor ExportedFiles::encoded(const Tensor& tensor, const WeightPlace& source) const {
  const std::vector<std::uint64_t>& codes = tensor.shape;
  const std::vector<std::uint64_t>& shape = source.tensor->shape;
  const auto found = scales_.find(tensor.codes.scales);
  const bool fp8 = tensor.codes.format == Format::fp8;
  const bool fits =
      fp8 ? shape == codes
          : codes.size() == 4 && shape == std::vector{codes[0], codes[2] * mxfp4::kBlock, codes[1]};
  if (!fits || found == scales_.end()) {
    refuse_tensor(source, fmt::format("does not fit the codes '{}' in {}",
                                      text::printable(tensor.name), kImportedLayout));
  }
  if (fp8) check_blocks(tensor, *found->second);
  const DType scales = weight_type(found->second->dtype).value_or(DType::f32);
  return {.format = tensor.codes.format,
          .codes = tensor.name,
          .scales = tensor.codes.scales,
          .form = {scales, wants_powers_of_two(layout_.quantization)},
          .shape = shape};
}

void ExportedFiles::add_codes(const Tensor& tensor) {
  const std::string& name = tensor.codes.weight;
  if (is_as_stored(tensor)) {
    tensors_.back().push_back(copy_of_bytes(*places_.find(tensor.name)));
    codes_.push_back(name);
    return;
  }
  const WeightPlace& source = source_of(tensor, name);
  const auto type = weight_type(tensor.codes.type);
  CopiedTensor values = values_of(name, source, type ? *type : type_of(source));
  if (written_.contains(tensor.codes.scales)) {
    values.encoded = encoded(tensor, source);
    values.stored = {.name = tensor.name,
                     .shape = tensor.shape,
                     .copied_dtype = tensor.dtype,
                     .copied_bytes = tensor.bytes};
    codes_.push_back(name);
  } else {
    dequantized_.push_back(name);
  }
  tensors_.back().push_back(std::move(values));
}

void ExportedFiles::add_scales(const Tensor& tensor) {
  if (is_as_stored(tensor)) {
    tensors_.back().push_back(copy_of_bytes(*places_.find(tensor.name)));
    return;
  }
  if (!written_.contains(tensor.name)) return;
  TensorToStore stored = {.name = tensor.name, .shape = tensor.shape};
  if (const auto type = weight_type(tensor.dtype)) {
    stored.dtype = *type;
  } else {
    stored.copied_dtype = tensor.dtype;
    stored.copied_bytes = tensor.bytes;
  }
  tensors_.back().push_back({.stored = std::move(stored)});
}

/// Adds the output matrix of a model whose merged adapters untie it.
void ExportedFiles::add_merged() {
  if (merged_ == nullptr || !merged_->added()) return;
  const WeightPlace& like = *merged_->added()->like;
  tensors_.back().push_back(values_of(merged_->added()->name, like, type_of(like)));
}

/// Divides the tensors into files. Tensors that fill whole pages come first, so that all of these
/// start at a page, since the format allows no gaps.
void ExportedFiles::divide(Bytes largest) {
  std::vector<std::vector<CopiedTensor>> files(1);
  Bytes used = 0;
  for (std::vector<CopiedTensor>& file : tensors_) {
    for (CopiedTensor& tensor : file) {
      const Bytes bytes = bytes_of(tensor.stored);
      if (!files.back().empty() && (bytes > largest || used > largest - bytes)) {
        files.emplace_back();
        used = 0;
      }
      used += bytes;
      files.back().push_back(std::move(tensor));
    }
  }
  for (auto& file : files) {
    std::stable_partition(file.begin(), file.end(), [](const CopiedTensor& tensor) {
      return bytes_of(tensor.stored) % kPage == 0;
    });
  }
  tensors_ = std::move(files);
}

std::vector<FolderFile> ExportedFiles::files() const {
  std::vector<std::vector<TensorToStore>> stored;
  for (const auto& file : tensors_) stored.push_back(stored_tensors(file));
  if (rules_.shard_size) return name_files(std::move(stored));
  std::vector<FolderFile> files;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const FolderLayout::File& file = layout_.files[i];
    files.push_back({file.name, std::move(stored[i]), file.metadata});
  }
  return files;
}

std::optional<text::Json> ExportedFiles::index() const {
  if (!rules_.shard_size) return layout_.index;
  return tensors_.size() > 1 ? std::optional(text::Json::object()) : std::nullopt;
}

std::string describe_codes(const std::string& text, const text::Json& quantization,
                           const std::vector<std::string>& codes,
                           const std::vector<std::string>& dequantized) {
  if (codes.empty()) return config::of_decoded_weights(text);
  std::unordered_set<std::string> experts_with_codes;
  for (const std::string& name : codes) experts_with_codes.insert(experts_of(name));
  std::vector<std::string> modules;
  std::unordered_set<std::string> known;
  for (const std::string& name : dequantized) {
    const std::string experts = experts_of(name);
    const bool alone = experts.empty() || experts_with_codes.contains(experts);
    std::string module = alone ? module_of(name) : experts;
    if (known.insert(module).second) modules.push_back(std::move(module));
  }
  return config::with_quantization(text, quantization, modules);
}

}  // namespace ballast::formats
