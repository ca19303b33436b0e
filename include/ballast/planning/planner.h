#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/schedule/rates.h"
#include "ballast/schedule/simulator.h"

namespace ballast::planning {

/// What the planner chose.
struct Decision {
  config::Config config;        ///< the one given, with every "auto" decided
  engine::Blueprint blueprint;  ///< of that config
  schedule::Prediction prediction;
  std::size_t simulated = 0;  ///< plans that were tried
};

/// Whether `config` leaves anything to the planner.
bool leaves_choices(const config::Config& config);

/// Decides every "auto" of `config` (tiers of weights, optimizer and activations per block,
/// micro-batch size and accumulation, staging buffers) for the most simulated tokens per second
/// within `budgets`. The same arguments give the same decision. `world` ranks share the batch.
/// Throws Error(memory) when nothing fits: which line, by how much, and the smallest change that
/// would make it fit; Error(config) for a batch that cannot be divided.
Decision decide(const config::Config& config, const model::Architecture& model,
                const memory::Budgets& budgets, const schedule::Rates& rates,
                std::uint32_t world = 1);

/// Something that could be changed, and how fast the run would then be.
struct Variant {
  std::string change;  ///< "train_batch_size 64: 2x the tokens per step"
  double tokens_per_second = 0.0;
  double speedup = 1.0;  ///< over the decision
};

/// What would make the run of `decision` faster, found by simulating changes of `config` (which the
/// decision was made from), budgets and rates; the most useful first, nothing that gains less than
/// 2%.
std::vector<Variant> find_improvements(const Decision& decision, const config::Config& config,
                                       const model::Architecture& model,
                                       const memory::Budgets& budgets, const schedule::Rates& rates,
                                       std::uint32_t world = 1);

}  // namespace ballast::planning
