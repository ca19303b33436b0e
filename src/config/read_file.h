#pragma once

#include <filesystem>
#include <string>

namespace ballast::config {

/// The text of a config file. Throws Error(config) when it cannot be read or is too long.
std::string read_file(const std::filesystem::path& file);

}  // namespace ballast::config
