#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/schedule/rates.h"
#include "ballast/schedule/simulator.h"

namespace ballast::planning {

/// Everything that a decision depends on.
struct PlanRequest {
  config::Config config;
  model::Architecture model;  ///< of the config
  memory::Budgets budgets;
  schedule::Rates rates;
  std::uint32_t world = 1;  ///< ranks that share the batch
  /// Memory that the kernels need for micro-batches of a shape; empty: the host device's where
  /// compute and update share cores, else CUDA's.
  std::function<model::KernelMemory(model::MicroBatchShape)> kernels;
  /// Operations that may be built and simulated in search of an answer.
  std::size_t work_limit = 2'000'000;
};

/// What the planner chose.
struct Decision {
  config::Config config;        ///< the one given, with every "auto" decided
  engine::Blueprint blueprint;  ///< the one that was simulated; that config draws it again
  schedule::Prediction prediction;
  std::size_t simulated = 0;  ///< plans that were tried
};

/// Whether `config` leaves anything to the planner.
bool leaves_choices(const config::Config& config);

/// Decides every "auto" of the config (tiers of weights, optimizer and activations per block,
/// micro-batch size and accumulation, staging buffers) for the most simulated tokens per second
/// within the budgets. Equal requests have equal decisions. Throws Error(memory) when nothing fits:
/// which line, by how much, and the smallest change with which it fits; Error(config) for a batch
/// that cannot be divided and for rates that lack what every plan needs.
Decision decide(const PlanRequest& request);

/// Something that could be changed, and how fast the run would then be.
struct Variant {
  std::string change;  ///< "2x the tokens per step (train_batch_size 64)"
  double tokens_per_second = 0.0;
  double speedup = 1.0;  ///< over the decision
};

/// What would make the run of `decision` faster, found by simulating changes of `request` (from
/// which the decision was made); the most useful first, nothing that gains less than 2%.
std::vector<Variant> find_improvements(const Decision& decision, const PlanRequest& request);

}  // namespace ballast::planning
