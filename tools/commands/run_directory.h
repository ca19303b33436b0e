#pragma once

#include <filesystem>

namespace ballast::tools {

/// A name for a run directory, from `config` and the time, below the user's state directory. Does
/// not create it.
std::filesystem::path default_run_directory(const std::filesystem::path& config);

/// Creates default_run_directory(`config`), with a suffix if it exists already, so that no two runs
/// share one. Throws Error(io).
std::filesystem::path create_run_directory(const std::filesystem::path& config);

}  // namespace ballast::tools
