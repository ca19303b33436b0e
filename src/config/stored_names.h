#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>

namespace ballast::config {

/// The names of the tensors in the safetensors files at `weights` (a file, an index, or a folder
/// with one of them), from the index or the header alone. Nothing if they cannot be read: whoever
/// reads the weights then says why. Never throws.
std::optional<std::set<std::string>> stored_names(const std::filesystem::path& weights);

/// Whether some of these tensors are codes of quantised matrices, or their scales.
bool are_codes(const std::set<std::string>& names);

/// Whether the matrix `name` is stored as codes of NF4 (bitsandbytes). The names may lack the first
/// part of `name`, as in files of a model without its head.
bool is_nf4(const std::set<std::string>& names, const std::string& name);

}  // namespace ballast::config
