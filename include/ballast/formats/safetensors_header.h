#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/stored_model.h"
#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

namespace ballast::formats {

// Names of files as Hugging Face's libraries write them.
inline constexpr const char* kSingleWeights = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

/// One tensor of a safetensors file.
struct StoredTensor {
  std::string name;
  std::string dtype;  ///< type name in the file: "F32", "BF16", "F16", or another one
  std::vector<std::uint64_t> shape;
  Elems elements = 0;
  Bytes offset = 0;  ///< from the start of the file
  Bytes bytes = 0;
};

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

// Reasons why weights cannot be read, for messages: what a file or folder is instead of a model's
// weights in safetensors, and what to do about it. Texts that continue a message begin with "; " or
// ": " and are empty if no reason is known.

namespace ballast::formats {

/// Number of bytes of a file that foreign_format() needs.
inline constexpr std::size_t kFormatBytes = 40;

/// Describes a file that begins with `bytes` (which may be fewer than kFormatBytes) if it is not
/// safetensors, with advice: "is a git-lfs pointer ...".
std::string_view foreign_format(std::span<const std::byte> bytes);

/// The files that `folder` has instead of model.safetensors or its index.
std::string files_instead(const std::filesystem::path& folder);

/// Advice about a tensor that is not F32, BF16 or F16.
std::string_view remedy_for_dtype(std::string_view dtype);

}  // namespace ballast::formats
