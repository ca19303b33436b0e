#pragma once

#include <filesystem>

namespace ballast::tools {

/// Default run directory of `config`: a new name from the config and the time, below the user's
/// state directory. Does not create it.
std::filesystem::path default_run_directory(const std::filesystem::path& config);

}  // namespace ballast::tools
