#pragma once

#include <filesystem>

namespace ballast::tools {

/// Where a run of the config file `config` goes when nobody says: a folder named after the config
/// and the time, below the user's state directory. It does not exist yet.
std::filesystem::path default_run_directory(const std::filesystem::path& config);

}  // namespace ballast::tools
