#include "src/formats/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

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

}  // namespace ballast::formats
