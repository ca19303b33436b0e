#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/places.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/memory/machine.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/planner/plan_choices.h"
#include "ballast/planner/plan_request.h"

namespace ballast::planner {

/// Decides every "auto" of the config (tiers of weights, optimizer and activations per block,
/// micro-batch size and accumulation, staging buffers) for the most simulated tokens per second
/// within the budgets. Equal requests have equal decisions. Throws Error(memory) if nothing fits,
/// with the largest ledger line, the missing bytes and the smallest change that fits, or if the
/// plan needs more NVMe space than the rates give. Throws Error(config) for a batch that cannot be
/// divided, or if a rate that every plan needs is missing.
Decision decide(const PlanRequest& request);

/// Throws like decide() if no plan fits the budgets. Needs no rates, so it can precede their
/// measurement.
void require_fit(const PlanRequest& request);

/// Returns the config of `request`. If it leaves numbers of tiles open (Config::open_tiles) and
/// nothing fits the budgets with those that sizes suggest, it has the fewest that fit, and a line
/// is logged. Other numbers change the last bits of results. Needs no rates.
config::Config with_fitting_tiles(const PlanRequest& request);

/// Returns the config of `request` for machine_rates(). Open activations and gradients are on NVMe
/// in it if no other tier is, and the run fits only with some of them there. Needs no rates.
config::Config measured_config(const PlanRequest& request);

/// Returns a warning if a step has fewer micro-batches than devices, so that some devices wait for
/// others; else "".
std::string describe_idle_devices(const step::Problem& problem);

/// A change of the config or machine, and the simulated speed with it.
struct Improvement {
  std::string change;  ///< "2x the tokens per step (train_batch_size 64)"
  double tokens_per_second = 0.0;
  double speedup = 1.0;  ///< compared with the decision
  /// Bytes written to NVMe per second, relative to the decision's. 1 if nothing is written.
  double wear = 1.0;

  /// Returns whether the drives last noticeably longer with the change.
  [[nodiscard]] bool spares_drives() const { return wear <= 0.8; }
};

/// Returns changes of `request` that make the run of its `decision` at least 2% faster in
/// simulation, or that spare the drives and do not make it slower. Fastest first.
std::vector<Improvement> find_improvements(const Decision& decision, const PlanRequest& request);

/// Draws the blueprint of `config`, without rates. Keeps the tiers that the config sets. Places
/// every "auto" on the fastest tier that fits: activations, then weights, then optimizer states,
/// blocks in forward order. Layers keep their intermediates while there is room, the last ones
/// first. Numbers of buffers that the config leaves open are reduced if nothing else fits.
/// `kernels`: memory for the device's kernels. Throws Error(memory) with the tier and the largest
/// ledger line if the plan does not fit, Error(config) for an invalid placement rule.
engine::Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                                 const memory::Budgets& budgets, const model::KernelSizes& kernels,
                                 const Mesh& mesh = {});

/// Uses the budgets and kernels of this machine, and this rank of `ranks` (may be null).
engine::Blueprint draw_blueprint(const config::Config& config, const comm::Ranks* ranks = nullptr);

/// A config with all choices as values of keys, and the blueprint of both.
struct Drawn {
  config::Config config;
  engine::Blueprint blueprint;
};

/// Draws `config` with the choices `chosen`, for this rank of `ranks` (may be null). Throws like
/// draw_blueprint(), and Error(config) for choices of another model.
Drawn draw_chosen(const config::Config& config, const PlanChoices& chosen,
                  const comm::Ranks* ranks = nullptr);

/// Draws a blueprint that only evaluates `config`: see step::Purpose. Weights are on the tiers that
/// the config sets, otherwise on the fastest one with room, blocks in forward order. With "auto"
/// the largest micro-batch that fits is used. Throws like draw_blueprint().
engine::Blueprint draw_evaluation(const config::Config& config);

/// Returns engine options for a run of `config`. `launch` selects this rank's swap paths. Throws
/// Error(config).
engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch = {});

/// Makes the engine from draw_blueprint() and engine_options(). `interrupted`, `ranks`: see
/// engine::Engine.
engine::Engine make_engine(const config::Config& config,
                           const std::atomic<bool>* interrupted = nullptr,
                           comm::Ranks* ranks = nullptr);

}  // namespace ballast::planner
