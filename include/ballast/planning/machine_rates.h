#pragma once

#include <filesystem>
#include <string>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// The rates of this machine for the model and paths of `config`: those of an earlier calibration
/// with the same calibration_key(), or of a new one, which takes a few seconds and is kept
/// for the next time. `recalibrate` asks for a new one. A file that cannot be read or written is
/// said in a log line and is no error. Throws Error like calibrate().
schedule::Rates machine_rates(const config::Config& config, const model::Architecture& model,
                              bool recalibrate = false);

/// Where the rates of that key are kept: $XDG_CACHE_HOME/ballast/rates-HASH.json, or in ~/.cache.
/// Empty when neither is there.
std::filesystem::path rates_cache_file(const std::string& key);

}  // namespace ballast::planning
