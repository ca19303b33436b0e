#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"

namespace ballast::engine {

/// What the config fixes for a block; empty members are for the planner.
struct Wish {
  config::TierChoice weights;
  config::TierChoice optimizer;
  config::TierChoice activations;
  std::optional<bool> recompute;
};

/// One wish per block of a model of so many. Throws Error(config) for a rule about a block that
/// does not exist.
std::vector<Wish> read_wishes(const config::Config& config, std::size_t blocks);

/// What `config` says without any choice of the planner: everything of a blueprint but placement,
/// schedule and ledger. `world` ranks share the batch.
Blueprint outline(const config::Config& config, const model::Architecture& model,
                  const memory::Budgets& budgets, const model::KernelMemory& kernels,
                  std::uint32_t world);

}  // namespace ballast::engine
