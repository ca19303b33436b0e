#pragma once

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/mesh.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/planner/plan_choices.h"

namespace ballast::planner {

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

}  // namespace ballast::planner
