#pragma once

#include <optional>
#include <string>

#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// Returns the cached rates with that key, named "this machine". Empty if there are none; logs a
/// warning if the file cannot be used.
std::optional<plan::Rates> read_rates(const std::string& key);

/// Writes the cache file of `key`. Returns whether it succeeded; otherwise logs a warning.
bool keep_rates(plan::Rates rates, const std::string& key);

/// Returns whether `fresh` rates are better than `kept` ones (nullptr: none): they were measured
/// without much other work, or with no more of it than the cached ones.
bool replaces(const plan::Rates& fresh, const plan::Rates* kept);

/// Returns "40 s", "3 minutes", "5 hours" or "12 days".
std::string describe_age(double seconds);

}  // namespace ballast::calibrate
