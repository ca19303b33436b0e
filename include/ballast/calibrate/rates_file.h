#pragma once

#include <filesystem>
#include <string>

#include "ballast/plan/rates.h"
#include "ballast/text/json.h"

namespace ballast::calibrate {

/// Reads a rates file: JSON with comments, keys as in configs/rates/README.md, units in the names
/// of the keys. Throws Error(config): one line with the file, the key and the problem.
plan::Rates load_rates(const std::filesystem::path& file);

/// Returns load_rates() of a file that a user names, with rates for what it lacks
/// (plan::complete()).
plan::Rates given_rates(const std::filesystem::path& file);

/// Reads rates in the form of a rates file from a JSON value of the file `name`. Throws like
/// load_rates().
plan::Rates read_rates_json(const text::Json& object, const std::string& name);
text::Json rates_json(const plan::Rates& rates);

/// Writes `rates` so that load_rates() returns equal ones. Replaces the file atomically. Throws
/// Error(io).
void save_rates(const std::filesystem::path& file, const plan::Rates& rates);

}  // namespace ballast::calibrate
