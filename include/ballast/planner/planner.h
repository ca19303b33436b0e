#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "ballast/core/places.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/memory/machine.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/executor.h"
#include "ballast/planner/plan_request.h"

namespace ballast::planner {

/// Returns whether `run` leaves choices that need rates: tiers of weights or optimizer states, the
/// micro-batch size or the number of devices. If these are set, a rule decides everything else that
/// is open (activations, gradients, the order, intermediates), and no measurement is needed.
bool leaves_choices(const engine::RunInputs& run);
/// Needs no model. `blocks`: its number of blocks.
bool leaves_choices(const engine::RunInputs& run, std::size_t blocks);

/// Decides every choice that the run leaves open (tiers of weights, optimizer and activations per
/// block, micro-batch size and accumulation, staging buffers) for the most simulated tokens per
/// second within the budgets. Equal requests have equal decisions. Throws Error(memory) if nothing
/// fits, with the largest ledger line, the missing bytes and the smallest change that fits, or if
/// the plan needs more NVMe space than the rates give. Throws Error(config) for a batch that cannot
/// be divided, or if a rate that every plan needs is missing.
Decision decide(const PlanRequest& request);

/// Throws like decide() if no plan fits the budgets. Needs no rates, so it can precede their
/// measurement.
void require_fit(const PlanRequest& request);

/// Returns one line for a request that does not fit: the tier, the missing bytes, the largest line
/// of its ledger, and the smallest changes with which it fits. Each change was tried; without
/// rates, only for memory.
std::string explain_refusal(const PlanRequest& request);

/// Returns the model's config for `request`. If the run leaves numbers of tiles open and nothing
/// fits the budgets with those that sizes suggest, it has the fewest that fit, and a line is
/// logged. Other numbers change the last bits of results. Needs no rates.
model::ModelConfig fitting_tiles(const PlanRequest& request);

/// Returns the run of `request` for machine_rates(). Open activations and gradients are on NVMe in
/// it if no other tier is, and the run fits only with some of them there. Needs no rates.
engine::RunInputs measured_run(const PlanRequest& request);

/// Returns a warning if a step has fewer micro-batches than devices, so that some devices wait for
/// others; else "".
std::string describe_idle_devices(const step::Problem& problem);

/// A change of the settings or machine, and the simulated speed with it.
struct Improvement {
  std::string change;  ///< "2x the tokens per step (train_batch_size 64)"
  double tokens_per_second = 0.0;
  double speedup = 1.0;  ///< compared with the decision
  /// Bytes written to NVMe per second, relative to the decision's. 1 if nothing is written.
  double wear = 1.0;

  /// Returns whether the drives last noticeably longer with the change.
  [[nodiscard]] bool spares_drives() const { return wear <= 0.8; }
};

/// Returns changes of `request` that make the run of its decision, `blueprint` and `prediction`, at
/// least 2% faster in simulation, or that spare the drives and do not make it slower. Fastest
/// first.
std::vector<Improvement> find_improvements(const engine::Blueprint& blueprint,
                                           const plan::Prediction& prediction,
                                           const PlanRequest& request);

/// Describes what bounds a run whose steps and evaluations took `seconds`, and which change would
/// make it faster. `improvements` (find_improvements()) is called only for a run that is not bound
/// by compute; empty if there are no rates to simulate with.
std::string advise(const engine::Blueprint& blueprint, const plan::LaneTotals& lanes,
                   double seconds,
                   const std::function<std::vector<Improvement>()>& improvements = {});

/// Draws the blueprint of `run`, without rates. Keeps the tiers that are set. Places everything
/// open on the fastest tier that fits: activations, then weights, then optimizer states, blocks in
/// forward order. Layers keep their intermediates while there is room, the last ones first. Open
/// numbers of buffers are reduced if nothing else fits. `kernels`: memory for the device's kernels.
/// Throws Error(memory) with the tier and the largest ledger line if the plan does not fit,
/// Error(config) for an invalid placement rule.
engine::Blueprint draw_blueprint(const engine::RunInputs& run, const memory::Budgets& budgets,
                                 const model::KernelSizes& kernels, const Mesh& mesh = {});

/// Draws a blueprint that only evaluates `run` on one rank: see step::Purpose. Weights are on the
/// tiers that are set, otherwise on the fastest one with room, blocks in forward order. An open
/// micro-batch size is the largest that fits. Throws like draw_blueprint().
engine::Blueprint draw_evaluation(
    const engine::RunInputs& run, const memory::Budgets& budgets,
    const std::function<model::KernelSizes(model::MicroBatchShape)>& kernels);

}  // namespace ballast::planner
