#include "src/formats/folder_layout.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/formats/model_folder.h"
#include "ballast/text/json.h"

#include "src/formats/quantized_matrices.h"

namespace ballast::formats {

namespace {

namespace fs = std::filesystem;
using text::Json;
using Role = FolderLayout::Role;
using Format = QuantizedWeights::Format;

constexpr const char* kIndexMetadata = "metadata";
constexpr const char* kQuantization = "quantization_config";

/// Names in the JSON.
constexpr std::array<std::string_view, 4> kCodeFormats = {"mxfp4", "nf4", "int8", "fp8"};
constexpr std::array<std::string_view, 4> kRoles = {"weight", "codes", "scales", "description"};

/// The metadata of an index; an empty object if it has none.
Json index_metadata(const fs::path& path) {
  const Json index =
      text::parse_json(read_small_file(path), path.string(), {.category = ErrorCategory::data});
  const Json* const metadata = index.find(kIndexMetadata);
  return metadata != nullptr && metadata->is_object() ? *metadata : Json::object();
}

/// Roles of the stored tensors by name; those that are missing are parts without a place.
using Roles = std::unordered_map<std::string, FolderLayout::Tensor>;

Roles roles_of(const WeightFiles& weights) {
  Roles roles;
  for (const WeightPlace& place : weights.tensors()) {
    if (place.quantized == nullptr) {
      roles[place.tensor->name].role = Role::weight;
      continue;
    }
    const QuantizedWeights& quantized = *place.quantized;
    FolderLayout::Tensor& codes = roles[quantized.codes.tensor->name];
    codes.role = Role::codes;
    const std::string& type = quantized.plain_type;
    codes.codes = {quantized.format, place.tensor->name, type.empty() ? place.tensor->dtype : type,
                   quantized.scales.tensor->name};
    roles[quantized.scales.tensor->name].role = Role::scales;
  }
  return roles;
}

Json to_json(const FolderLayout::Tensor& tensor) {
  Json shape = Json::array();
  for (const std::uint64_t extent : tensor.shape) shape.push_back(extent);
  Json json = Json::object(
      {{"name", tensor.name}, {"dtype", tensor.dtype}, {"shape", shape}, {"bytes", tensor.bytes}});
  if (tensor.role != Role::weight) {
    json.add("role", kRoles[static_cast<std::size_t>(tensor.role)]);
  }
  if (tensor.role == Role::codes) {
    json.add("format", kCodeFormats[static_cast<std::size_t>(tensor.codes.format)]);
    json.add("weight", tensor.codes.weight);
    json.add("type", tensor.codes.type);
    json.add("scales", tensor.codes.scales);
  }
  if (!tensor.copy_of.empty()) json.add("copy_of", tensor.copy_of);
  return json;
}

/// Reads the JSON of a layout.
class LayoutReader {
 public:
  explicit LayoutReader(fs::path path) : path_(std::move(path)) {}

  [[nodiscard]] FolderLayout read() const {
    const Json json =
        text::parse_json(read_small_file(path_), path_.string(), {.category = ErrorCategory::data});
    FolderLayout layout;
    for (const Json& file : member(json, "files").elements()) {
      layout.files.push_back({.name = text_of(file, "name"), .metadata = {}, .tensors = {}});
      for (const auto& [key, value, at] : member(file, kIndexMetadata).members()) {
        layout.files.back().metadata.emplace(key, value.text());
      }
      for (const Json& tensor : member(file, "tensors").elements()) {
        layout.files.back().tensors.push_back(tensor_of(tensor));
      }
    }
    if (layout.files.empty()) refuse();
    if (const Json* const index = json.find("index")) layout.index = *index;
    if (const Json* const found = json.find(kQuantization)) layout.quantization = *found;
    return layout;
  }

 private:
  [[noreturn]] void refuse() const {
    throw Error(ErrorCategory::data,
                fmt::format("{} is not the layout that a run has recorded; remove it to export the "
                            "weights without it",
                            path_.string()));
  }
  [[nodiscard]] const Json& member(const Json& json, const char* key) const {
    const Json* const found = json.find(key);
    if (found == nullptr) refuse();
    return *found;
  }
  [[nodiscard]] const std::string& text_of(const Json& json, const char* key) const {
    const Json& found = member(json, key);
    if (!found.is_string()) refuse();
    return found.text();
  }
  [[nodiscard]] std::uint64_t number_of(const Json& json) const {
    const auto number = json.whole();
    if (!number) refuse();
    return *number;
  }
  template <std::size_t N>
  [[nodiscard]] std::size_t index_in(const std::array<std::string_view, N>& names,
                                     const std::string& name) const {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) refuse();
    return static_cast<std::size_t>(found - names.begin());
  }
  [[nodiscard]] FolderLayout::Tensor tensor_of(const Json& json) const {
    FolderLayout::Tensor tensor = {.name = text_of(json, "name"),
                                   .dtype = text_of(json, "dtype"),
                                   .shape = {},
                                   .bytes = number_of(member(json, "bytes"))};
    for (const Json& extent : member(json, "shape").elements()) {
      tensor.shape.push_back(number_of(extent));
    }
    if (json.find("role") != nullptr) {
      tensor.role = static_cast<Role>(index_in(kRoles, text_of(json, "role")));
    }
    if (tensor.role == Role::codes) {
      tensor.codes = {static_cast<Format>(index_in(kCodeFormats, text_of(json, "format"))),
                      text_of(json, "weight"), text_of(json, "type"), text_of(json, "scales")};
    }
    if (json.find("copy_of") != nullptr) tensor.copy_of = text_of(json, "copy_of");
    return tensor;
  }

  fs::path path_;
};

}  // namespace

FolderLayout layout_of(const WeightFiles& weights, const text::Json& description) {
  FolderLayout layout;
  const Roles roles = roles_of(weights);
  const bool sharded = weights.path().native().ends_with(".index.json");
  if (sharded) layout.index = index_metadata(weights.path());
  for (const SafetensorsReader& file : weights.files()) {
    FolderLayout::File& added = layout.files.emplace_back();
    added.name = sharded ? file.path().filename().string() : std::string(kSingleWeights);
    added.metadata = file.metadata();
    for (const StoredTensor& tensor : file.tensors()) {
      FolderLayout::Tensor& one = added.tensors.emplace_back();
      one.role = Role::description;
      if (const auto known = roles.find(tensor.name); known != roles.end()) one = known->second;
      one.name = tensor.name;
      one.dtype = tensor.dtype;
      one.shape = tensor.shape;
      one.bytes = tensor.bytes;
    }
  }
  if (const Json* const found = description.find(kQuantization)) layout.quantization = *found;
  return layout;
}

std::string to_text(const FolderLayout& layout) {
  constexpr unsigned kLevels = 4;  // one line per tensor
  Json files = Json::array();
  for (const FolderLayout::File& file : layout.files) {
    Json metadata = Json::object();
    for (const auto& [key, value] : file.metadata) metadata.add(key, value);
    Json tensors = Json::array();
    for (const FolderLayout::Tensor& tensor : file.tensors) tensors.push_back(to_json(tensor));
    files.push_back(
        Json::object({{"name", file.name}, {kIndexMetadata, metadata}, {"tensors", tensors}}));
  }
  Json json = Json::object({{"files", files}});
  if (layout.index) json.add("index", *layout.index);
  if (!layout.quantization.is_null()) json.add(kQuantization, layout.quantization);
  return json.pretty(kLevels) + "\n";
}

std::optional<FolderLayout> recorded_layout(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / kImportedLayout, ignored)) return std::nullopt;
  return LayoutReader(folder / kImportedLayout).read();
}

StoredPlaces::StoredPlaces(const WeightFiles& weights) {
  for (const SafetensorsReader& file : weights.files()) {
    for (const StoredTensor& tensor : file.tensors()) {
      found_.emplace(tensor.name, &places_.emplace_back(WeightPlace{&tensor, &file}));
    }
  }
}

const WeightPlace* StoredPlaces::find(const std::string& name) const {
  const auto found = found_.find(name);
  return found == found_.end() ? nullptr : found->second;
}

bool is_written(QuantizedWeights::Format format) {
  return format == Format::fp8 || format == Format::mxfp4;
}

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
     "embed_audio vision_adapter vision_projection patch_merge_mlp"},
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
  for (const char* const indexer : {".self_attn.indexer.", ".self_attn.index_"}) {
    if (name.find(indexer) != std::string::npos) return PassingPart::indexer;
  }
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
