#pragma once

#include <cstdint>
#include <string>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/step/placement.h"
#include "ballast/text/json.h"

namespace ballast::planner {

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

}  // namespace ballast::planner
