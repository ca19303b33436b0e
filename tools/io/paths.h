#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::tools {

/// The folders to measure, absolute. Throws Error(usage) when one is given twice or there are too
/// many, Error(io) when one is missing or no directory.
std::vector<std::filesystem::path> measured_paths(const std::vector<std::string>& given,
                                                  std::string_view task);

/// "/data: ext4, 71.9 GiB free", and what speaks against it.
std::string describe_path(const std::filesystem::path& path);

/// parse_bytes with `option` in its error.
Bytes read_size(const std::string& text, std::string_view option);

}  // namespace ballast::tools
