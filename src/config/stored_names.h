#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

namespace ballast::config {

/// Longest header of a safetensors file that is read, which is the limit of the format's own
/// library.
inline constexpr Bytes kLongestHeader = 100'000'000;
/// Size of the header's length field.
inline constexpr Bytes kLengthBytes = 8;

struct HeaderText {
  std::uint64_t length = 0;         ///< length in the file
  std::optional<std::string> json;  ///< empty if the file, or kLongestHeader, is shorter
};

/// The header of an open safetensors file of `size` bytes. Throws Error(data) if the file has no
/// length field, Error(io).
HeaderText read_header_text(const Descriptor& file, const std::filesystem::path& path, Bytes size);

/// The name that tensor `name` has in a folder of the text model alone. Models of text and images
/// (or audio) store it with "language_model." or "text_model." in addition. Returns other names
/// unchanged.
std::string name_in_text_model(const std::string& name);

/// The names of the tensors in the safetensors files at `weights` (a file, an index, or a folder
/// with one of them), each by name_in_text_model(), from the index or the header alone. Empty if
/// they cannot be read: the reader of the weights then reports why. Never throws.
std::optional<std::set<std::string>> stored_names(const std::filesystem::path& weights);

/// Whether some of these tensors are codes of quantised matrices, or their scales.
bool are_quantized(const std::set<std::string>& names);

/// Whether the matrix `name` is stored in NF4 (bitsandbytes). The names may lack the first part of
/// `name`, as in files of a model without its head.
bool is_nf4(const std::set<std::string>& names, const std::string& name);

}  // namespace ballast::config
