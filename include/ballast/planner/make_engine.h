#pragma once

#include <atomic>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/engine.h"

namespace ballast::planner {

/// Returns engine options for a run of `config`. `launch` selects this rank's swap paths. Throws
/// Error(config).
engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch = {});

/// Makes the engine from draw_blueprint() and engine_options(). `interrupted`, `ranks`: see
/// engine::Engine.
engine::Engine make_engine(const config::Config& config,
                           const std::atomic<bool>* interrupted = nullptr,
                           comm::Ranks* ranks = nullptr);

}  // namespace ballast::planner
