#include "ballast/formats/stored_weights.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

Elems WeightPlace::first_in_whole() const {
  if (stack == nullptr) return 0;
  return (tensor->offset - stack->tensor->offset) / (tensor->bytes / tensor->elements);
}

Bytes stored_bytes(const WeightPlace& place) {
  if (place.quantized == nullptr) return place.tensor->bytes;
  const QuantizedWeights& quantized = *place.quantized;
  Bytes bytes = quantized.codes.tensor->bytes + quantized.scales.tensor->bytes;
  if (quantized.nested.tensor != nullptr) bytes += quantized.nested.tensor->bytes;
  return bytes;
}

void read_stored(const WeightPlace& place, Bytes first, std::span<std::byte> out) {
  text::read_fully(place.file->descriptor(), place.file->path(), place.tensor->offset + first, out);
}

void refuse_tensor(const WeightPlace& place, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}: tensor '{}' {}", place.file->path().string(),
                                               text::printable(place.tensor->name), what));
}

DType type_of(const WeightPlace& place) {
  if (const auto type = weight_type(place.tensor->dtype)) return *type;
  refuse_tensor(place, fmt::format("has dtype {}; weights can be F32, BF16 or F16{}",
                                   place.tensor->dtype, remedy_for_dtype(place.tensor->dtype)));
}

namespace {

using text::printable;

/// Parts of tensors' names that show where they come from.
struct Sign {
  std::string_view parts;
  std::string_view cause;
};

constexpr std::string_view kOfPeft =
    "belongs to an unmerged PEFT model; merge its adapters (merge_and_unload() in PEFT) and save "
    "the result, or give the base model and the folder of the adapters";
constexpr std::string_view kOfImages =
    "belongs to a model of text and images (or audio) whose text model Ballast does not find in "
    "it; "
    "save the text model alone, with its own config.json";
constexpr std::string_view kOfGptq =
    "is quantised by GPTQ or AWQ; give the folder of the original model";
constexpr std::string_view kOfFp8 =
    "is quantised to fp8 or by compressed-tensors; give the folder of the original model, or load "
    "this one with transformers, dequantize() it and save it";
constexpr std::string_view kOfHqq = "is quantised by HQQ; give the folder of the original model";
constexpr std::string_view kOfOriginal =
    "has a name of Meta's own format; convert it with transformers, or give the folder for "
    "transformers";

/// Parts that may be anywhere in a name. Wrappers come first, since they can wrap all the others.
constexpr auto kSigns = std::to_array<Sign>({
    {"_orig_mod.",
     "has the prefix of torch.compile; save the model that was compiled (model._orig_mod), or "
     "rename the tensors"},
    {"_fsdp_wrapped_module.",
     "has the prefix of FSDP; gather and save the full state dict of the unwrapped model, or "
     "rename the tensors"},
    {"_checkpoint_wrapped_module.",
     "has the prefix of activation checkpointing; save the unwrapped model, or rename the tensors"},
    {"_forward_module.",
     "has the prefix of Lightning; save the module inside, or rename the tensors"},
    {".base_layer. .lora_A. .lora_B. .modules_to_save. base_model.model.", kOfPeft},
    {"language_model. thinker. talker.", kOfImages},
    {".qweight .qzeros", kOfGptq},
    {".weight_packed .weight_scale", kOfFp8},
    {".W_q", kOfHqq},
    {".attention.wq. tok_embeddings.", kOfOriginal},
});

const Sign* sign_of(const std::string& name) {
  const bool found_in_wrapper = config::name_in_text_model(name) != name;
  const auto found = std::find_if(kSigns.begin(), kSigns.end(), [&](const Sign& sign) {
    if (found_in_wrapper && sign.cause == kOfImages) return false;
    return std::ranges::any_of(text::words_of(sign.parts), [&](std::string_view part) {
      return name.find(part) != std::string::npos;
    });
  });
  return found == kSigns.end() ? nullptr : &*found;
}

/// The common prefix of all names, up to a dot.
std::string common_prefix(std::span<const WeightPlace> tensors) {
  std::string prefix = tensors.front().tensor->name;
  for (const WeightPlace& place : tensors) {
    const std::string& name = place.tensor->name;
    const auto end = std::mismatch(prefix.begin(), prefix.end(), name.begin(), name.end()).first;
    prefix.erase(end, prefix.end());
  }
  return prefix.substr(0, prefix.rfind('.') + 1);
}

std::string with_cause(std::string_view stored, std::string_view cause) {
  return fmt::format(", but '{}', which {}", printable(stored), cause);
}

}  // namespace

std::string cause_of_missing(std::span<const WeightPlace> tensors, const std::string& name) {
  if (tensors.empty()) return ": it has no tensors";
  const StoredTensor* like = nullptr;  // that tensor under another name
  const StoredTensor* marked = nullptr;
  const std::string end = "." + name.substr(name.find('.') + 1);
  for (const WeightPlace& place : tensors) {
    const bool has_sign = sign_of(place.tensor->name) != nullptr;
    const bool is_like = place.tensor->name.ends_with(end);
    if (is_like && has_sign)
      return with_cause(place.tensor->name, sign_of(place.tensor->name)->cause);
    if (is_like && like == nullptr) like = place.tensor;
    if (has_sign && marked == nullptr) marked = place.tensor;
  }
  if (marked != nullptr) return with_cause(marked->name, sign_of(marked->name)->cause);
  const std::string prefix = common_prefix(tensors);
  if (like == nullptr || prefix.empty()) return "";
  const std::string& stored = like->name;
  if (prefix.starts_with("module.")) {
    return with_cause(stored,
                      "has the prefix of DataParallel or DDP; save the module inside "
                      "(model.module), or rename the tensors");
  }
  if (!stored.ends_with("." + name)) return "";
  return with_cause(
      stored,
      fmt::format(
          "has a prefix, '{}', like all others; save the model inside, or rename the tensors",
          printable(stored.substr(0, stored.size() - name.size()))));
}

std::string cause_of_unused(const std::string& name) {
  const Sign* const sign = sign_of(name);
  return sign == nullptr ? "" : fmt::format(": '{}' {}", printable(name), sign->cause);
}

}  // namespace ballast::formats
