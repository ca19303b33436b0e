#pragma once

#include <cstdint>
#include <filesystem>

#include "ballast/planner/forecast.h"

#include "tools/commands/request.h"

namespace ballast::tools {

struct ForecastRequest {
  ConfigRequest config;
  std::filesystem::path rates;  ///< file of the machine's rates; "": measure this machine
  std::uint32_t world = 1;
  bool recalibrate = false;
};

/// Loads the config of `request`, with the tiles of planner::with_fitting_tiles(). Throws Error.
config::Config forecast_config(const ForecastRequest& request);

/// Predicts a run of `config`, the config of `request`. Measures this machine's rates unless they
/// are cached or given. Throws Error.
planner::Forecast forecast_of(const ForecastRequest& request, const config::Config& config);

}  // namespace ballast::tools
