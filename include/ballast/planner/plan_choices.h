#pragma once

#include <cstdint>
#include <string>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/simulator.h"
#include "ballast/step/problem.h"
#include "ballast/text/json.h"

namespace ballast::planner {

/// Returns whether `config` leaves choices that need rates: tiers of weights or optimizer states,
/// the micro-batch size or the number of devices. If these are set, a rule decides everything else
/// that is open (activations, gradients, the order, intermediates), and no measurement is needed.
bool leaves_choices(const config::Config& config);

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

/// Returns `config` with micro-batches of `size` sequences (or pairs). `data_ranks`: number of
/// ranks with other sequences, Mesh::data.
config::Config with_micro_batches(const config::Config& config, std::uint64_t size,
                                  std::uint32_t data_ranks);

/// Returns `config` with `count` devices for each rank, the first ones of ballast.devices.
config::Config with_devices(const config::Config& config, std::uint32_t count);

/// Returns `config` with all choices that affect the sizes of blocks: micro-batch, expert
/// parallelism, devices, budgets and sub-groups.
config::Config with_sizes(const config::Config& config, const PlanChoices& chosen,
                          std::uint32_t data_ranks);

/// Returns `config` with all choices as values of keys, from which draw_blueprint() draws the same
/// blueprint: the most common tiers as sections, other blocks as rules.
config::Config settle(const config::Config& config, const PlanChoices& chosen,
                      const engine::Blueprint& blueprint);

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

}  // namespace ballast::planner
