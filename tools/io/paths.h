#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::tools {

/// The absolute folders to measure. Throws Error(usage) for duplicate or too many folders,
/// Error(io) for a path that is not a directory.
std::vector<std::filesystem::path> measured_paths(const std::vector<std::string>& given,
                                                  std::string_view task);

/// Returns "/data: ext4, 71.9 GiB free", followed by the reasons if it is unsuited for swapping.
std::string describe_path(const std::filesystem::path& path);

/// Like parse_bytes, with `option` in its error.
Bytes read_size(const std::string& text, std::string_view option);

}  // namespace ballast::tools
