#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/formats/stored_tensor.h"

#include "src/config/stored_names.h"

namespace ballast::formats {

using config::kLengthBytes;
using config::kLongestHeader;

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  ///< in the order of their data
  std::map<std::string, std::string> metadata;
};

/// Parses and checks the JSON `text` of a file with `data_bytes` of data. Throws Error(data) whose
/// message starts with `file`.
SafetensorsHeader parse_header(std::string_view text, Bytes data_bytes, const std::string& file);

/// The head of a file with these tensors, one after the other: the length field and the JSON,
/// padded with spaces to a multiple of 4 KiB. Uses their names, dtypes, shapes and bytes.
std::string format_head(const std::vector<StoredTensor>& tensors,
                        const std::map<std::string, std::string>& metadata);

/// Name of the type in files: "F32", "BF16" or "F16".
std::string_view dtype_name(DType type);

/// The type of weights with this name, if there is one.
std::optional<DType> weight_type(std::string_view dtype);

/// Computes the product of `shape`; false if it overflows.
bool count_elements(const std::vector<std::uint64_t>& shape, Elems& elements);

/// "[2, 3]", for messages.
std::string format_shape(const std::vector<std::uint64_t>& shape);

}  // namespace ballast::formats
