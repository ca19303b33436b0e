#pragma once

#include <atomic>
#include <cstdint>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/memory/budget.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

// What a config says, in the terms of the engine.
namespace ballast::planning {

/// `wanted` with each 0 in it filled in: from `available` bytes of this machine's memory, and from
/// that of the device that `config` names, where it has its own (memory::resolve_budgets).
memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets wanted,
                                Bytes available, std::uint32_t local_rank = 0);

/// The blueprint of `config` without knowing any rate: what the config names is kept; every "auto"
/// is filled from the fastest tier that still fits, activations before weights before optimizer
/// states, blocks in forward order; then layers keep their intermediates while there is room, the
/// last ones first. `kernels`: memory that the device's kernels need. Throws Error(memory) naming
/// the tier and the largest line when it does not fit, Error(config) for a wrong placement rule.
engine::Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                                 const memory::Budgets& budgets, const model::KernelMemory& kernels,
                                 std::uint32_t world = 1, std::uint32_t rank = 0);

/// The same with the budgets and kernels of this machine, for one of `ranks` (nullptr: one alone).
engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks = nullptr);

/// Everything that a run of `config` needs besides its blueprint. `launch` says which of the swap
/// paths are this rank's. Throws Error(config).
engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch = {});

/// The engine of draw_blueprint() and engine_options(). `interrupted`, `ranks`: see engine::Engine.
engine::Engine make_engine(const config::Config& config,
                           const std::atomic<bool>* interrupted = nullptr,
                           comm::Ranks* ranks = nullptr);

}  // namespace ballast::planning
