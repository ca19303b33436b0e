#include "ballast/formats/safetensors_header.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

namespace ballast::formats {

namespace {

using text::Json;
using text::printable;

constexpr const char* kMetadata = "__metadata__";
// Deepest nesting of a header: file, tensor, shape.
constexpr std::size_t kDeepest = 3;

/// Bytes of an element; 0 for an unknown dtype.
Bytes size_of_dtype(std::string_view name) {
  const auto is_one_of = [name](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_one_of({"F64", "I64", "U64"})) return 8;
  if (is_one_of({"F32", "I32", "U32"})) return 4;
  if (is_one_of({"F16", "BF16", "I16", "U16"})) return 2;
  return is_one_of({"F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"}) ? 1 : 0;
}

struct Refusal {
  const std::string& file;

  [[noreturn]] void operator()(const std::string& what) const {
    throw Error(ErrorCategory::data, fmt::format("{}: {}", file, what));
  }
};

std::vector<std::uint64_t> read_counts(const Json& tensor, const char* key, const std::string& name,
                                       const Refusal& refuse) {
  const Json* const found = tensor.find(key);
  if (found == nullptr || !found->is_array()) {
    refuse(fmt::format("tensor '{}' has no list '{}'", name, key));
  }
  std::vector<std::uint64_t> counts;
  for (const Json& count : found->elements()) {
    if (!count.whole()) {
      refuse(fmt::format("tensor '{}': '{}' must hold whole numbers only", name, key));
    }
    counts.push_back(*count.whole());
  }
  return counts;
}

StoredTensor read_tensor(const std::string& key, const Json& entry, Bytes data_bytes,
                         const Refusal& refuse) {
  const std::string name = printable(key);
  if (!entry.is_object()) refuse(fmt::format("tensor '{}' is not a JSON object", name));
  StoredTensor tensor;
  tensor.name = key;
  const Json* const dtype = entry.find("dtype");
  if (dtype == nullptr || !dtype->is_string()) {
    refuse(fmt::format("tensor '{}' has no dtype", name));
  }
  tensor.dtype = dtype->text();
  const auto width = size_of_dtype(tensor.dtype);
  if (width == 0) {
    refuse(fmt::format("tensor '{}' has unknown dtype '{}'", name, printable(tensor.dtype)));
  }
  if (entry.members().size() != 3) refuse(fmt::format("tensor '{}' has unknown entries", name));
  tensor.shape = read_counts(entry, "shape", name, refuse);
  const auto range = read_counts(entry, "data_offsets", name, refuse);
  if (range.size() != 2 || range[0] > range[1] || range[1] > data_bytes) {
    refuse(
        fmt::format("tensor '{}' reaches beyond the file's {} bytes of data: the file is truncated "
                    "or damaged; download or copy it again",
                    name, data_bytes));
  }
  tensor.offset = range[0];
  tensor.bytes = range[1] - range[0];
  Bytes needed = 0;
  if (!count_elements(tensor.shape, tensor.elements) ||
      __builtin_mul_overflow(tensor.elements, width, &needed) || needed != tensor.bytes) {
    refuse(fmt::format("tensor '{}' has {} bytes, which does not match {} {}", name, tensor.bytes,
                       tensor.dtype, printable(format_shape(tensor.shape))));
  }
  return tensor;
}

void read_metadata(const Json& entries, std::map<std::string, std::string>& metadata,
                   const Refusal& refuse) {
  if (!entries.is_object()) refuse("__metadata__ is not a JSON object");
  for (const auto& [key, value, at] : entries.members()) {
    if (!value.is_string()) {
      refuse(fmt::format("__metadata__ '{}' is not a string", printable(key)));
    }
    metadata[key] = value.text();
  }
}

/// Sorts by offset and checks that the tensors cover the data without overlap or gap.
void check_cover(std::vector<StoredTensor>& tensors, Bytes data_bytes, const Refusal& refuse) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  Bytes end = 0;
  for (const auto& tensor : tensors) {
    if (tensor.offset != end) {
      refuse(fmt::format("tensor '{}' starts at byte {} of the data, but the one before ends at {}",
                         printable(tensor.name), tensor.offset, end));
    }
    end += tensor.bytes;
  }
  if (end != data_bytes) {
    refuse(fmt::format(
        "the file has {} bytes of data, but its tensors take {}; download or copy it again",
        data_bytes, end));
  }
}

}  // namespace

std::string_view dtype_name(DType type) {
  switch (type) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      break;
  }
  return "F16";
}

std::optional<DType> weight_type(std::string_view dtype) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    if (dtype == dtype_name(type)) return type;
  }
  return std::nullopt;
}

bool count_elements(const std::vector<std::uint64_t>& shape, Elems& elements) {
  elements = 1;
  return std::none_of(shape.begin(), shape.end(), [&](std::uint64_t count) {
    return __builtin_mul_overflow(elements, count, &elements);
  });
}

std::string format_shape(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const auto count : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(count);
  }
  return text + "]";
}

SafetensorsHeader parse_header(std::string_view json, Bytes data_bytes, const std::string& file) {
  const Refusal refuse{file};
  if (!json.starts_with('{')) refuse("the header does not start with '{': not a safetensors file");
  const Json document = text::parse_json(json, file + ": the header",
                                         {.category = ErrorCategory::data, .deepest = kDeepest});
  SafetensorsHeader header;
  for (const auto& [name, entry, at] : document.members()) {
    if (name == kMetadata) {
      read_metadata(entry, header.metadata, refuse);
    } else {
      header.tensors.push_back(read_tensor(name, entry, data_bytes, refuse));
    }
  }
  check_cover(header.tensors, data_bytes, refuse);
  return header;
}

std::string format_head(const std::vector<StoredTensor>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  Json document = Json::object();
  for (const auto& [key, value] : metadata) document[kMetadata][key] = value;
  std::set<std::string> names = {kMetadata};
  Bytes offset = 0;
  for (const auto& tensor : tensors) {
    expects(names.insert(tensor.name).second, "safetensors: two tensors have the same name");
    const Bytes end = offset + tensor.bytes;
    Json shape = Json::array();
    for (const auto count : tensor.shape) shape.push_back(count);
    document.add(tensor.name, Json::object({{"dtype", tensor.dtype},
                                            {"shape", shape},
                                            {"data_offsets", Json::array({offset, end})}}));
    offset = end;
  }
  const std::string header = document.compact();
  const Bytes length = round_up(kLengthBytes + header.size(), kPage) - kLengthBytes;
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, kLengthBytes);
  head += header;
  head.resize(kLengthBytes + length, ' ');
  return head;
}

namespace {

namespace fs = std::filesystem;

/// The extension of a name in lower case: ".bin".
std::string extension_of(const fs::path& path) {
  std::string end = path.extension().string();
  std::transform(end.begin(), end.end(), end.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return end;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    entries.push_back(entry->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

/// Describes a file or folder next to config.json that is there instead of the weights.
std::string meaning_of(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string shown = printable(name);
  const std::string end = extension_of(path);
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  if (end == ".incomplete" || end == ".part" || end == ".crdownload" || end == ".aria2") {
    return fmt::format("; {} is a download that has not ended: finish it", shown);
  }
  if (is_folder && (name.starts_with("checkpoint-") || fs::exists(path / kSingleWeights, ignored) ||
                    fs::exists(path / kWeightsIndex, ignored))) {
    return fmt::format("; its folder {} has weights: give that", shown);
  }
  if (is_folder && name.starts_with("pytorch_model_fsdp")) {
    return fmt::format("; merge the shards in {} with accelerate merge-weights", shown);
  }
  if (is_folder && name.starts_with("global_step")) {
    return fmt::format(
        "; {} is a checkpoint of DeepSpeed: convert it with its zero_to_fp32.py and "
        "--safe_serialization",
        shown);
  }
  if (end == ".safetensors" && name.find("-of-") != std::string::npos) {
    return fmt::format("; it has {}, but the index of such files is missing: download {} too",
                       shown, kWeightsIndex);
  }
  if (end == ".safetensors") {
    return fmt::format(
        "; it has {}: if that is the model with transformers' names, rename it to {}", shown,
        kSingleWeights);
  }
  if (end == ".bin" || end == ".pt" || end == ".pth" || end == ".ckpt" || end == ".h5" ||
      end == ".msgpack") {
    if (name.starts_with("training_args") || name.starts_with("optimizer") ||
        name.starts_with("scheduler") || name.starts_with("rng_state")) {
      return "";
    }
    return fmt::format(
        "; it has {}: load it with transformers and save it with save_pretrained, "
        "which writes safetensors",
        shown);
  }
  if (end == ".gguf") {
    return fmt::format(
        "; it has {}: give the original model, or load it with transformers "
        "(from_pretrained with gguf_file) and save it",
        shown);
  }
  return "";
}

}  // namespace

std::string_view foreign_format(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  using namespace std::string_view_literals;
  // The length of a header in 8 bytes, followed by JSON. Lengths may look like the beginning of a
  // pickle.
  if (text.size() > sizeof(std::uint64_t) && text[sizeof(std::uint64_t)] == '{') return "";
  if (text.starts_with("version https://git-lfs")) {
    return "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder";
  }
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02"sv)) {
    return "is a file of PyTorch, not safetensors: load it with transformers and save it with "
           "save_pretrained";
  }
  if (text.starts_with("GGUF")) {
    return "is GGUF, not safetensors: give the original model, or load it with transformers "
           "(from_pretrained with gguf_file) and save it";
  }
  if (text.starts_with("<!DOCTYPE") || text.starts_with("<!doctype") || text.starts_with("<html")) {
    return "is a web page, not safetensors: the download failed; repeat it";
  }
  if (text.starts_with("{\"") || text.starts_with("{\n")) {
    return "is JSON, not safetensors: an index must be called model.safetensors.index.json";
  }
  const bool empty = std::all_of(text.begin(), text.end(), [](char c) { return c == '\0'; });
  if (empty && text.size() >= sizeof(std::uint64_t)) {
    return "begins with zeros: its download or copy has not ended; repeat it";
  }
  return "";
}

std::string files_instead(const fs::path& folder) {
  for (const fs::path& path : entries_of(folder)) {
    if (std::string meaning = meaning_of(path); !meaning.empty()) return meaning;
  }
  for (const fs::path& path : entries_of(folder / ".cache" / "huggingface" / "download")) {
    if (extension_of(path) != ".incomplete") continue;
    return "; its download has not ended: finish it";
  }
  return "; download the weights into it";
}

std::string_view remedy_for_dtype(std::string_view dtype) {
  if (dtype.starts_with("F8_") || dtype.starts_with("F6_") || dtype.starts_with("F4")) {
    return "; it is quantised: give the folder of the original model, or load this one with "
           "transformers, dequantize() it and save it";
  }
  if (dtype == "I32" || dtype == "U8" || dtype == "I8") {
    return "; if it is quantised, give the folder of the original model";
  }
  return "; convert the model to one of these and save it again";
}

}  // namespace ballast::formats
