#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/planning/engine_inputs.h"

#include "src/planning/filling.h"

namespace ballast::planning {

/// One constraint per block of a model with `blocks` blocks. Throws Error(config) for a rule about
/// a block that does not exist.
std::vector<PlacementConstraint> read_constraints(const config::Config& config, std::size_t blocks);

/// The value of ballast.order.
std::string name_of(schedule::Order order);

/// The number of speculating blocks that `config` names; 0 for "auto", which only a search decides.
std::size_t named_speculation(const config::Config& config);

/// The blueprint of `config` before anything is placed: everything but placement, schedule and
/// ledger. `world` ranks share the batch.
engine::Blueprint outline(const config::Config& config, const model::Architecture& model,
                          const memory::Budgets& budgets, const model::KernelSizes& kernels,
                          std::uint32_t world);

/// The distinct paths of both offload sections in order, or the run directory; each with the
/// settings of its entry in aio.paths, or else those of aio. Paths are assigned round-robin to the
/// ranks of a machine; with fewer paths than ranks, ranks share a path.
state::SwapOptions swap_options(const config::Config& config, const comm::Launch& launch = {});

/// Threads, instruction set and NUMA node of the update. Throws Error(config) for an instruction
/// set that this machine lacks.
cpu_adam::UpdaterOptions updater_options(const config::Config& config);

/// Free memory of the device that `config` names, for rank `local_rank` of its machine; 0 if the
/// device uses host memory.
Bytes own_device_memory(const config::Config& config, std::uint32_t local_rank);

}  // namespace ballast::planning
