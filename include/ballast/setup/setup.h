#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/simulator.h"
#include "ballast/planner/planner.h"
#include "ballast/step/problem.h"
#include "ballast/text/json.h"

namespace ballast::setup {

/// Returns the request to plan a run of `config` with `world` ranks, without budgets and rates.
planner::PlanRequest plan_request(const config::Config& config, std::uint32_t world = 1);

/// Returns a function that computes the memory of this machine's kernels for `run`.
std::function<model::KernelSizes(model::MicroBatchShape)> kernels_here(engine::RunInputs run);

/// Choices of a planner for a config. With them each rank draws its blueprint without a search or a
/// rule. Rank 0 sends them to the others, and saved plans contain them.
struct PlanChoices {
  std::uint64_t micro_batch = 0;   ///< counted like BatchSection::micro_batch
  std::uint64_t expert_ranks = 1;  ///< see model::RankSplit
  std::uint32_t devices = 1;       ///< number for each rank
  Elems sub_group_size = 0;
  memory::Budgets budgets;  ///< budgets of one rank
  step::Order order = step::Order::layer_major;
  bool prefetches_experts = false;
  step::BufferCounts buffers;
  step::Placement placement;
};

/// Returns the choices that lead to `blueprint`.
PlanChoices choices_of(const engine::Blueprint& blueprint);

/// Returns `config` with all choices that affect the sizes of blocks: micro-batch, expert
/// parallelism, devices (the first ones of ballast.devices), budgets and sub-groups. `data_ranks`:
/// Mesh::data.
config::Config with_sizes(const config::Config& config, const PlanChoices& chosen,
                          std::uint32_t data_ranks);

/// Returns `config` with all choices of a placed `blueprint` as values of keys, from which
/// draw_blueprint() draws the same blueprint: the most common tiers as sections, other blocks as
/// rules.
config::Config settle(const config::Config& config, const engine::Blueprint& blueprint);

text::Json choices_json(const PlanChoices& choices);
/// Inverse of choices_json(). Throws Error(config) with the member that is missing or wrong.
PlanChoices read_choices(const text::Json& json);

/// {"weights": TIER, "optimizer": TIER, ..., "recompute": false, "speculates": false}.
text::Json block_json(const step::BlockPlacement& block);

/// Returns the description of a plan for `ballast plan --json` and run.json: `ledger` (a list of
/// `tier`, `kind`, `bytes`, and with several devices `device`), `budgets`, `peak_bytes` (of the
/// fullest device), `devices`, sizes of the batch, `placement` of each block, `buffers`; with
/// `prediction` (may be null) also `predicted_step_seconds`, `lanes` and `bounds`.
text::Json plan_json(const engine::Blueprint& blueprint, const plan::Prediction* prediction);

/// Draws the blueprint of `config` (planner::draw_blueprint()) for the budgets and kernels of this
/// machine, and this rank of `ranks` (may be null). If a config without choices does not fit, the
/// error has advice.
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

/// Draws a blueprint that only evaluates `config` on this machine: planner::draw_evaluation().
engine::Blueprint draw_evaluation(const config::Config& config);

/// Returns engine options for a run of `config`. `launch` selects this rank's swap paths. Throws
/// Error(config).
engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch = {});

/// Makes the engine from draw_blueprint() and engine_options(). `interrupted`, `ranks`: see
/// engine::Engine.
engine::Engine make_engine(const config::Config& config,
                           const std::atomic<bool>* interrupted = nullptr,
                           comm::Ranks* ranks = nullptr);

}  // namespace ballast::setup
