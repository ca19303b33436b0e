#pragma once

#include <optional>
#include <string>

#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// The kept rates with that key, named "this machine". Empty if there are none; logs a warning if
/// the file cannot be used.
std::optional<plan::Rates> read_rates(const std::string& key);

/// Writes the cache file of `key`; returns whether it could. Logs a warning otherwise.
bool keep_rates(plan::Rates rates, const std::string& key);

/// Whether `fresh` rates are worth more than `kept` ones (nullptr: there are none): they were
/// measured without much other work, or with no more of it than the kept ones.
bool replaces(const plan::Rates& fresh, const plan::Rates* kept);

/// "40 s", "3 minutes", "5 hours", "12 days".
std::string describe_age(double seconds);

}  // namespace ballast::calibrate
