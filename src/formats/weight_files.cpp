#include "ballast/formats/weight_files.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/formats/stored_weights.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/quantized_matrices.h"

namespace ballast::formats {

namespace {

constexpr std::string_view kExperts = ".experts.";

/// A stacked tensor and the matrices of one expert in it, in their order.
struct Stack {
  std::string_view name;
  std::array<std::string_view, 2> matrices;  ///< the second one may be ""
};
constexpr std::array<Stack, 2> kStacks = {
    {{"gate_up_proj", {"gate_proj", "up_proj"}}, {"down_proj", {"down_proj", ""}}}};

}  // namespace

std::vector<StoredTensor> matrices_of_experts(const StoredTensor& tensor) {
  std::vector<StoredTensor> matrices;
  const bool separable = tensor.elements > 0 && tensor.bytes % tensor.elements == 0;
  if (tensor.shape.size() != 3 || !separable) return matrices;
  for (const Stack& stack : kStacks) {
    const std::string_view name = tensor.name;
    if (!name.ends_with(stack.name)) continue;
    const std::string_view before = name.substr(0, name.size() - stack.name.size());
    const std::uint64_t parts = stack.matrices.back().empty() ? 1 : 2;
    if (!before.ends_with(kExperts) || tensor.shape[1] % parts != 0) continue;
    const std::uint64_t rows = tensor.shape[1] / parts;
    const std::uint64_t count = tensor.shape[0] * parts;
    const Bytes bytes = tensor.bytes / count;
    matrices.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      matrices.push_back(
          {.name = fmt::format("{}{}.{}.weight", before, i / parts, stack.matrices.at(i % parts)),
           .dtype = tensor.dtype,
           .shape = {rows, tensor.shape[2]},
           .elements = tensor.elements / count,
           .offset = tensor.offset + i * bytes,
           .bytes = bytes});
    }
  }
  return matrices;
}

namespace {

namespace fs = std::filesystem;
using text::Json;
using text::printable;

[[noreturn]] void refuse_file(const fs::path& path, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}{}", path.string(), what));
}

/// Runs `read`. Errors of the system get a message that `path` cannot be read.
template <class Read>
auto naming(const fs::path& path, Read&& read) {
  try {
    return read();
  } catch (const Error& error) {
    if (error.error_number() == 0) throw;
    throw Error(error.category(), fmt::format("cannot read {}", path.string()),
                error.error_number());
  }
}

SafetensorsReader open_weights(const fs::path& path) {
  return naming(path, [&] { return SafetensorsReader(path); });
}

/// The file in `folder` that Hugging Face's own loader would read.
fs::path choose_file(const fs::path& folder) {
  std::error_code ignored;
  for (const char* name : {kSingleWeights, kWeightsIndex, config::kAdapterWeights}) {
    if (fs::exists(folder / name, ignored)) return folder / name;
  }
  refuse_file(folder, fmt::format(" has neither {} nor {}{}", kSingleWeights, kWeightsIndex,
                                  files_instead(folder)));
}

std::string read_index(const fs::path& path) {
  return naming(path, [&] {
    const auto file = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
    const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
    if (size > kLongestHeader) {
      refuse_file(path, fmt::format(" has {} bytes: too long for the index of a model", size));
    }
    std::string content(size, '\0');
    text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
    if (content.starts_with("version https://git-lfs")) {
      refuse_file(path, fmt::format(" {}", foreign_format(std::as_bytes(std::span(content)))));
    }
    return content;
  });
}

/// File names by tensor.
std::map<std::string, std::string> read_weight_map(const fs::path& path) {
  constexpr std::size_t kDeepest = 4;
  const Json index = text::parse_json(read_index(path), path.string(),
                                      {.category = ErrorCategory::data, .deepest = kDeepest});
  const Json* const map = index.find("weight_map");
  if (map == nullptr || !map->is_object()) {
    refuse_file(path, " has no object 'weight_map': not the index of a sharded model");
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file, at] : map->members()) {
    const std::string name = printable(tensor);
    if (!file.is_string()) {
      refuse_file(path, fmt::format(": the file of tensor '{}' is not a string", name));
    }
    const std::string& text = file.text();
    // Later messages print the path, so a name must have no control characters.
    const bool plain = !text.empty() && text != "." && text != ".." &&
                       text.find('/') == std::string::npos && printable(text, text.size()) == text;
    if (!plain) {
      refuse_file(
          path, fmt::format(": tensor '{}' is in '{}', but an index may name only files next to it",
                            name, printable(text)));
    }
    files.emplace(tensor, text);
  }
  if (files.empty()) refuse_file(path, ": 'weight_map' names no tensors");
  return files;
}

}  // namespace

WeightFiles::WeightFiles(const fs::path& path) : path_(path) {
  std::error_code ignored;
  if (fs::is_directory(path_, ignored)) path_ = choose_file(path_);
  if (path_.native().ends_with(".index.json")) {
    open_index();
  } else {
    files_.push_back(open_weights(path_));
    add_places();
  }
  pair_codes();
  index_names();
  index_stacks();
}

namespace {

/// The type of the first matrix that is not quantised, nor scales; F32 if there is none.
DType usual_type(const std::vector<WeightPlace>& places) {
  for (const WeightPlace& place : places) {
    const auto type = weight_type(place.tensor->dtype);
    const bool is_matrix = place.tensor->shape.size() == 2 && !has_scales(place.tensor->name);
    if (is_matrix && type) return *type;
  }
  return DType::f32;
}

}  // namespace

/// Replaces codes, their scales and descriptions by the dequantised tensors.
void WeightFiles::pair_codes() {
  const FindPlace find = [this](const std::string& name) {
    const auto found = found_.find(name);
    return found == found_.end() ? nullptr : &places_[found->second];
  };
  const DType others = usual_type(places_);
  std::vector<WeightPlace> places;
  std::unordered_set<const StoredTensor*> parts;
  for (const WeightPlace& place : places_) {
    std::optional<Pairing> pairing = pair_quantized(place, others, find);
    if (!pairing) {
      places.push_back(place);
      continue;
    }
    dequantized_.push_back(pairing->dequantized);
    quantized_.push_back(pairing->quantized);
    places.push_back({&dequantized_.back(), place.file, &quantized_.back()});
    parts.insert(pairing->parts.begin(), pairing->parts.end());
  }
  if (quantized_.empty()) return;
  std::erase_if(places, [&](const WeightPlace& place) { return parts.contains(place.tensor); });
  places_ = std::move(places);
  found_.clear();
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (found_.emplace(places_[i].tensor->name, i).second) continue;
    refuse_file(places_[i].file->path(), fmt::format(": tensor '{}' is stored twice, also in MXFP4",
                                                     printable(places_[i].tensor->name)));
  }
}

void WeightFiles::add_places() {
  for (const SafetensorsReader& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) {
      const auto [known, added] = found_.emplace(tensor.name, places_.size());
      if (!added) {
        refuse_file(
            file.path(),
            fmt::format(
                ": tensor '{}' is in {} too; remove the file of another version of the model",
                printable(tensor.name), places_[known->second].file->path().filename().string()));
      }
      places_.push_back({&tensor, &file});
    }
  }
}

/// Refuses an index that names missing files.
void WeightFiles::check_shards(const std::map<std::string, std::size_t>& shards) const {
  constexpr std::size_t kNamed = 3;
  std::string missing;
  std::size_t count = 0;
  for (const auto& [name, position] : shards) {
    std::error_code ignored;
    if (fs::exists(path_.parent_path() / name, ignored)) continue;
    if (++count <= kNamed) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (count == 0) return;
  refuse_file(path_, fmt::format(" names {} file{}, of which {} {} missing ({}{}); download {} too",
                                 shards.size(), shards.size() == 1 ? "" : "s", count,
                                 count == 1 ? "is" : "are", missing, count > kNamed ? ", ..." : "",
                                 count == 1 ? "it" : "them"));
}

void WeightFiles::open_index() {
  const auto map = read_weight_map(path_);
  std::map<std::string, std::size_t> opened;  // position in files_ by name
  for (const auto& [tensor, name] : map) opened.emplace(name, 0);
  check_shards(opened);
  files_.reserve(opened.size());
  for (auto& [name, position] : opened) {
    position = files_.size();
    files_.push_back(open_weights(path_.parent_path() / name));
  }
  add_places();
  for (const auto& [tensor, name] : map) {
    const SafetensorsReader& file = files_[opened.at(name)];
    if (file.find(tensor) != nullptr) continue;
    refuse_file(file.path(), fmt::format(" has no tensor '{}', but {} names it there: they are of "
                                         "different versions; download both again",
                                         printable(tensor), path_.filename().string()));
  }
  for (const WeightPlace& place : places_) {
    if (map.contains(place.tensor->name)) continue;
    refuse_file(place.file->path(),
                fmt::format(" has tensor '{}', which {} does not name: they are of different "
                            "versions; download both again",
                            printable(place.tensor->name), path_.filename().string()));
  }
}

namespace {

/// Like config::name_in_text_model(), also for files of PEFT.
std::string name_alone(const std::string& name) {
  const std::string prefix = config::kAdapterPrefix;
  if (!name.starts_with(prefix)) return config::name_in_text_model(name);
  return prefix + config::name_in_text_model(name.substr(prefix.size()));
}

/// The name that transformers 5 gives a tensor when it saves a model with norms after sublayers in
/// some layers and before them in others. "" if it has no other name.
std::string other_name(const std::string& name) {
  constexpr std::string_view kAfterAttention = ".post_attention_layernorm.weight";
  if (!name.ends_with(kAfterAttention)) return "";
  return name.substr(0, name.size() - kAfterAttention.size()) + ".feedforward_layer_norm.weight";
}

}  // namespace

/// Indexes the tensors of a text model inside another model.
void WeightFiles::index_names() {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const std::string& stored = places_[i].tensor->name;
    std::string name = name_alone(stored);
    if (name != stored) in_text_model_.emplace(std::move(name), i);
  }
}

/// Indexes the matrices of experts in tensors that stack those of a layer.
void WeightFiles::index_stacks() {
  for (const WeightPlace& place : places_) {
    if (place.quantized != nullptr) continue;
    for (StoredTensor& matrix : matrices_of_experts(*place.tensor)) {
      const StoredTensor& kept = in_stacks_.emplace_back(std::move(matrix));
      stacked_.emplace(name_alone(kept.name), WeightPlace{&kept, place.file, nullptr, &place});
    }
  }
}

const WeightPlace* WeightFiles::find(const std::string& name) const {
  const auto found = found_.find(name);
  if (found != found_.end()) return &places_[found->second];
  const std::string alone = name_alone(name);
  for (const auto* names : {&in_text_model_, &found_}) {
    const auto inside = names->find(alone);
    if (inside != names->end()) return &places_[inside->second];
  }
  const std::string inner = name.substr(name.find('.') + 1);
  if (inner != name) {
    const auto inside = found_.find(inner);
    if (inside != found_.end()) return &places_[inside->second];
  }
  const std::string other = other_name(name);
  if (const auto inside = found_.find(other); inside != found_.end()) {
    return &places_[inside->second];
  }
  for (const std::string& one : {alone, inner}) {
    const auto inside = stacked_.find(one);
    if (inside != stacked_.end()) return &inside->second;
  }
  return nullptr;
}

Bytes WeightFiles::bytes() const {
  Bytes sum = 0;
  for (const WeightPlace& place : places_) sum += place.tensor->bytes;
  return sum;
}

void WeightFiles::read(const std::string& name, std::span<float> out, Elems first) const {
  if (const WeightPlace* const place = find(name)) {
    if (place->quantized == nullptr) {
      return place->file->read(place->whole().tensor->name, out, place->first_in_whole() + first);
    }
    if (out.empty()) return;
    std::vector<std::byte> stored(out.size() * size_of(type_of(*place)));
    read_quantized(*place, first, stored, nullptr);
    return decode(stored, type_of(*place), out);
  }
  std::vector<std::string> names;
  for (const WeightPlace& place : places_) names.push_back(place.tensor->name);
  const std::string cause = cause_of_missing(places_, name);
  refuse_file(path_, fmt::format(" has no tensor '{}'{}", name,
                                 cause.empty() ? did_you_mean(name, names) : cause));
}

bool have_equal_values(const WeightFiles& files, const StoredTensor& one,
                       const StoredTensor& other) {
  constexpr Elems kPiece = Elems{1} << 20;
  if (one.shape != other.shape) return false;
  std::vector<float> left;
  std::vector<float> right;
  for (Elems done = 0; done < one.elements; done += left.size()) {
    left.resize(std::min(kPiece, one.elements - done));
    right.resize(left.size());
    files.read(one.name, left, done);
    files.read(other.name, right, done);
    if (left != right) return false;
  }
  return true;
}

}  // namespace ballast::formats
