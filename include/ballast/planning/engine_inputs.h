#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/memory/budget.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

namespace ballast::planning {

/// `requested` with each 0 replaced: by a share of the `available` bytes of this machine's memory,
/// or of the memory of the device in `config` if it has its own (memory::resolve_budgets).
memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets requested,
                                Bytes available, std::uint32_t local_rank = 0);

/// The model that `config` trains, with what it freezes. Throws Error(config).
model::Architecture model_of(const config::Config& config);

/// The blueprint of `config`, without rates. Keeps the tiers that the config names. Places every
/// "auto" on the fastest tier that fits: activations, then weights, then optimizer states, blocks
/// in forward order. Layers keep their intermediates while there is room, the last ones first.
/// Numbers of buffers that the config leaves open are smaller if nothing else fits. `kernels`:
/// memory for the device's kernels. Throws Error(memory) naming the tier and the largest ledger
/// line if the plan does not fit, Error(config) for an invalid placement rule.
engine::Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                                 const memory::Budgets& budgets, const model::KernelSizes& kernels,
                                 std::uint32_t world = 1, std::uint32_t rank = 0);

/// The same with the budgets and kernels of this machine, for this rank of `ranks` (may be null).
engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks = nullptr);

/// A blueprint that only evaluates `config`: see schedule::Purpose. Weights stay on the tiers that
/// the config names, or else on the fastest one with room, blocks in forward order. With "auto" the
/// largest micro-batch that fits is taken. Throws like draw_blueprint().
engine::Blueprint draw_evaluation(const config::Config& config);

/// Engine options of a run of `config`. `launch` selects this rank's swap paths. Throws
/// Error(config).
engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch = {});

/// Throws Error(device) if `config` names a GPU that this rank cannot use: a cause to mend before
/// budgets, which are guessed without it.
void check_device(const config::Config& config, const comm::Launch& launch = {});

/// Checks this rank's swap paths if `config` names NVMe for anything and they are known: only rank
/// 0 knows a run directory that has no name. Throws like state::check_paths().
void check_swap_paths(const config::Config& config, const comm::Launch& launch = {});

/// Bytes written to each swap directory of a machine on which `ranks` ranks work alike. `own`: the
/// bytes that one rank writes to each of its directories, or one sum of unknown division. Ranks
/// with as many directories divide theirs likewise, others evenly.
std::vector<Bytes> written_by_machine(const config::Config& config, std::uint32_t ranks,
                                      std::span<const Bytes> own);

/// The engine of draw_blueprint() and engine_options(). `interrupted`, `ranks`: see engine::Engine.
engine::Engine make_engine(const config::Config& config,
                           const std::atomic<bool>* interrupted = nullptr,
                           comm::Ranks* ranks = nullptr);

}  // namespace ballast::planning
