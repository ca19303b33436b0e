#include "src/formats/passing_tensors.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "ballast/config/checkpoint_config.h"
#include "ballast/formats/model_folder.h"
#include "ballast/text/json.h"
#include "ballast/text/words.h"

#include "src/config/stored_names.h"
#include "src/formats/fp8.h"

namespace ballast::formats {
namespace {

/// The first part of the names of a part's tensors, perhaps after "model.".
struct FirstWords {
  PassingPart part;
  std::string_view words;
};
constexpr std::array<FirstWords, 4> kFirstWords = {{
    {PassingPart::mtp, "mtp mtp_layers"},
    {PassingPart::vision,
     "visual vision_tower vision_model vision_encoder vision_embedder image_newline"},
    {PassingPart::audio, "audio_tower audio_model audio_encoder"},
    {PassingPart::projector,
     "multi_modal_projector mm_projector vision_projector audio_projector connector embed_vision "
     "embed_audio"},
}};

constexpr std::string_view kLayers = "layers.";

/// The number of the layer that tensor `name` is in.
std::optional<std::uint64_t> layer_of(std::string_view name) {
  const auto at = name.find(kLayers);
  if (at == std::string_view::npos) return {};
  const char* const begin = name.data() + at + kLayers.size();
  std::uint64_t layer = 0;
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), layer);
  return error == std::errc() && end != begin ? std::optional(layer) : std::nullopt;
}

/// Returns whether the tensor makes keys or values of a layer that reads those of another layer.
bool makes_unread_keys(const WeightFiles& files, const std::string& name) {
  constexpr std::array<std::string_view, 4> kParts = {".self_attn.k_proj.", ".self_attn.v_proj.",
                                                      ".self_attn.k_norm.", ".self_attn.v_norm."};
  const bool keys = std::any_of(kParts.begin(), kParts.end(), [&](std::string_view part) {
    return name.find(part) != std::string::npos;
  });
  const auto layer = layer_of(name);
  const std::filesystem::path config = files.path().parent_path() / config::kCheckpointConfig;
  std::error_code ignored;
  if (!keys || !layer || !std::filesystem::exists(config, ignored)) return false;
  const text::Json all =
      text::parse_json(read_small_file(config), config.string(), {.comments = true});
  const text::Json* const nested = all.find("text_config");
  const text::Json& text_model = nested == nullptr ? all : *nested;
  const text::Json* const shared = text_model.find("num_kv_shared_layers");
  const text::Json* const layers = text_model.find("num_hidden_layers");
  if (shared == nullptr || layers == nullptr) return false;
  const std::uint64_t count = shared->whole().value_or(0);
  return count > 0 && *layer + count >= layers->whole().value_or(0);
}

/// Whether the tensor scales the inputs of a matrix in FP8. In the weights of a run, the matrix may
/// no longer be in FP8.
bool scales_activations(const WeightFiles& files, const std::string& name) {
  const std::string weight = fp8::scaled_by(name);
  return !weight.empty() && files.find(weight) != nullptr;
}

/// The name of the eh_proj that marks the layer of tensor `name` as one for multi-token prediction:
/// "model.layers.61.eh_proj.weight"; "" if the tensor is in no numbered layer.
std::string mtp_mark(const std::string& name) {
  const auto at = name.find(kLayers);
  if (at == std::string::npos || (at > 0 && name[at - 1] != '.')) return "";
  std::size_t end = at + kLayers.size();
  const std::size_t digits = end;
  while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end])) != 0) ++end;
  if (end == digits || end == name.size() || name[end] != '.') return "";
  return name.substr(0, end) + ".eh_proj.weight";
}

}  // namespace

std::string_view to_string(PassingPart part) {
  switch (part) {
    case PassingPart::mtp:
      return "MTP layers";
    case PassingPart::vision:
      return "vision";
    case PassingPart::audio:
      return "audio";
    case PassingPart::projector:
      return "projector";
    case PassingPart::indexer:
      return "indexers";
    case PassingPart::unread_keys:
      return "unread keys and values";
    case PassingPart::activation_scales:
      break;
  }
  return "scales of activations";
}

std::optional<PassingPart> passing_part(const WeightFiles& files, const std::string& name) {
  constexpr std::string_view kModel = "model.";
  const std::string in_text_model = config::name_in_text_model(name);
  std::string_view rest = in_text_model;
  if (rest.starts_with(kModel)) rest.remove_prefix(kModel.size());
  const std::string_view first = rest.substr(0, rest.find('.'));
  for (const FirstWords& known : kFirstWords) {
    if (text::has_word(known.words, first)) return known.part;
  }
  const std::string mark = mtp_mark(name);
  if (!mark.empty() && files.find(mark) != nullptr) return PassingPart::mtp;
  if (name.find(".self_attn.indexer.") != std::string::npos) return PassingPart::indexer;
  if (makes_unread_keys(files, in_text_model)) return PassingPart::unread_keys;
  if (scales_activations(files, name)) return PassingPart::activation_scales;
  return {};
}

void TensorTotals::add(const WeightPlace& place) {
  ++tensors;
  elements += place.tensor->elements;
  bytes += stored_bytes(place);
}

std::map<PassingPart, TensorTotals> passing_totals(const WeightFiles& files) {
  std::map<PassingPart, TensorTotals> totals;
  for (const WeightPlace* const place : passing_tensors(files)) {
    totals[*passing_part(files, place->tensor->name)].add(*place);
  }
  return totals;
}

std::string describe(const std::map<PassingPart, TensorTotals>& totals) {
  std::string text;
  for (const auto& [part, total] : totals) {
    text +=
        fmt::format("{}{} {} tensor{}, {} parameters, {}", text.empty() ? "" : "; ",
                    to_string(part), total.tensors, total.tensors == 1 ? "" : "s",
                    format_count(static_cast<double>(total.elements)), format_bytes(total.bytes));
  }
  return text;
}

std::vector<const WeightPlace*> passing_tensors(const WeightFiles& files) {
  std::vector<const WeightPlace*> passing;
  for (const WeightPlace& place : files.tensors()) {
    if (passing_part(files, place.tensor->name)) passing.push_back(&place);
  }
  return passing;
}

}  // namespace ballast::formats
