#pragma once

#include <filesystem>

#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// Reads a rates file: JSON, comments allowed, keys as in configs/rates/README.md, units in the
/// keys' names. Throws Error(config): one line with the file, the key and what is wrong.
schedule::Rates load_rates(const std::filesystem::path& file);

/// Writes `rates` so that load_rates() returns equal ones; replaces the file atomically. Throws
/// Error(io).
void save_rates(const std::filesystem::path& file, const schedule::Rates& rates);

}  // namespace ballast::planning
