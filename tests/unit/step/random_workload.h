#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/build.h"

#include "src/step/plan_types.h"
#include "tests/support/with_program.h"

namespace ballast::step {

/// Random numbers from a seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  /// From `low` to `high`, both included.
  std::uint64_t pick(std::uint64_t low, std::uint64_t high) {
    return low + random_() % (high - low + 1);
  }
  std::uint32_t pick32(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(pick(low, high));
  }
  bool toss() { return pick(0, 1) == 1; }

 private:
  std::mt19937_64 random_;
};

/// A schedule problem: any sizes, placements and options that build() accepts.
struct TestProblem {
  Workload workload;
  Placement placement;
  Options options;
};

inline Options random_options(Dice& dice) {
  Options options;
  options.order = dice.toss() ? Order::layer_major : Order::micro_batch_major;
  options.update = dice.toss() ? Update::gated : Update::eager;
  options.buffers.weight_slots = dice.pick32(1, 3);
  options.buffers.weight_staging = dice.pick32(1, 4);
  options.buffers.state_staging = dice.pick32(1, 4);
  options.buffers.activation_staging = dice.pick32(1, 4);
  options.buffers.gradient_staging = dice.pick32(1, 4);
  options.buffers.gradient_slots = 1 + options.buffers.gradient_staging % 2;
  return options;
}

/// Sizes of AdamW with bf16 weights, in one sub-group.
inline BlockWork bf16_block(std::string name, Elems elements, double forward_flops) {
  return {.name = std::move(name),
          .weight_bytes = 2 * elements,
          .accumulator_bytes = 4 * elements,
          .gradient_bytes = 2 * elements,
          .forward_flops = forward_flops,
          .sub_groups = {{10 * elements, 2 * elements, 26 * elements}}};
}

/// Sub-groups of the same; in half of the problems blocks are cut.
inline std::vector<SubGroup> random_sub_groups(std::uint64_t seed, Elems elements) {
  Dice dice(seed + 13'000'027);
  const Elems most = dice.toss() ? elements : dice.pick(1, 20) * 2048;
  std::vector<SubGroup> groups;
  for (Elems left = elements; left > 0; left -= std::min(left, most)) {
    const Elems size = std::min(left, most);
    groups.push_back({10 * size, 2 * size, 26 * size});
  }
  return groups;
}

/// In half of the problems, makes some halves of layers, which are not halves of the same layer,
/// routers and experts.
inline void add_experts(Workload& work, std::uint64_t seed) {
  Dice dice(seed + 19'000'013);
  if (dice.toss()) return;
  for (std::uint32_t b = work.first_layer(); b < work.head(); ++b) {
    if (work.blocks[b].continues || work.blocks[b].mid_layer || !work.is_part_of_layer(b)) continue;
    const std::uint32_t last = work.last_tile(b);
    if (work.blocks[last + 1].mid_layer || dice.pick(0, 3) == 0) continue;
    work.blocks[b].routes = true;
    work.routing_bytes = 64;
    work.router_totals_bytes = 128;
    // The first may be an expert for all rows.
    for (std::uint32_t e = b + (dice.toss() ? 2 : 1); e <= last; ++e) {
      work.blocks[e].is_expert = true;
      work.blocks[e].token_share = 0.25;
    }
  }
}

/// Says which blocks are tiles: of the vocabulary and, in a quarter of the problems, of layers.
inline void cut_blocks(Workload& work, std::uint64_t seed) {
  const auto blocks = static_cast<std::uint32_t>(work.blocks.size());
  for (std::uint32_t b = 1; b < blocks; ++b) {
    work.blocks[b].continues = b < work.vocabulary_tiles || b > work.head();
  }
  if (seed % 4 != 1) return;
  Dice cut(seed + 17'000'023);
  for (std::uint32_t b = work.first_layer() + 1; b < work.head(); ++b) {
    work.blocks[b].continues = cut.pick(0, 2) > 0;
  }
  // Of two halves in a row, each with tiles, the second may belong to the same layer.
  bool half = false;
  for (std::uint32_t b = work.first_layer(); b < work.head(); ++b) {
    if (work.blocks[b].continues) continue;
    work.blocks[b].mid_layer = half && work.is_part_of_layer(b) && cut.toss();
    half = work.is_part_of_layer(b) && !work.blocks[b].mid_layer;
  }
  if (!work.cuts_layers()) return;
  add_experts(work, seed);
  work.rows_bytes = std::max(work.rows_bytes, cut.pick(1, 16) * 1024);
  work.row_sums_bytes = std::max(work.row_sums_bytes, cut.pick(1, 16) * 1024);
}

/// In half of the problems some blocks are frozen, sometimes all at the start, so that the backward
/// pass is shorter, and some in part. All tiles of the output matrix are frozen or none; then the
/// block with the norm may train that alone, and a tied embedding its positions.
inline void freeze_blocks(Workload& work, std::uint64_t seed) {
  Dice dice(seed + 23'000'009);
  if (dice.toss()) return;
  const auto blocks = static_cast<std::uint32_t>(work.blocks.size());
  const std::uint32_t below = dice.toss() ? dice.pick32(0, blocks - 1) : 0;
  const std::uint32_t chosen = dice.pick32(below, blocks - 1);
  const bool output = dice.toss();
  const auto has_output = [&](std::uint32_t b) {
    return work.tied ? work.is_embedding(b) : b >= work.head();
  };
  const auto trains = [&](std::uint32_t b) {
    if (has_output(b) && output) return true;
    const bool tile_alone = has_output(b) && !work.tied && b > work.head();
    return !tile_alone && (b == chosen || (b > below && dice.toss()));
  };
  if (!output && work.tied) work.tied_accumulator_bytes = 0;
  std::uint32_t first = blocks;
  for (std::uint32_t b = blocks; b-- > 0;) {
    BlockWork& block = work.blocks[b];
    const bool trained = trains(b) || (b == 0 && first == blocks);
    if (trained) first = b;
    if (!trained || (has_output(b) && !output)) block.frozen_flops = block.forward_flops;
    const Elems elements = block.weight_bytes / 2;
    if (trained && elements > 2048 && dice.pick(0, 2) == 0) {
      const Elems some = dice.pick(1, elements / 2048 - 1) * 2048;
      block.accumulator_bytes = 4 * some;
      block.gradient_bytes = 2 * some;
      block.sub_groups = random_sub_groups(seed + 37 * b, some);
    }
    if (trained) continue;
    block.accumulator_bytes = block.gradient_bytes = 0;
    block.sub_groups.clear();
  }
  if (work.is_embedding(first)) first = 0;
  first = std::min(first, work.head());
  while (work.is_layer(first) && (work.blocks[first].continues || work.blocks[first].mid_layer)) {
    --first;
  }
  work.first_differentiated = first;
}

inline TestProblem random_problem(std::uint64_t seed) {
  Dice dice(seed);
  TestProblem problem;
  const auto blocks = dice.pick(2, 7);
  for (std::uint64_t b = 0; b < blocks; ++b) {
    const Bytes elements = dice.pick(1, 20) * 2048;
    BlockWork block = bf16_block(fmt::format("block {}", b), elements, b == 0 ? 0.0 : 100.0);
    block.recomputed_flops = b == 0 ? 0.0 : 60.0;
    block.sub_groups = random_sub_groups(seed + 31 * b, elements);
    problem.workload.blocks.push_back(std::move(block));
    problem.placement.blocks.push_back({.weights = kTiers[dice.pick(0, 2)],
                                        .optimizer = kTiers[dice.pick(0, 2)],
                                        .activations = kTiers[dice.pick(0, 2)]});
  }
  Dice gradients(seed + 11'000'027);
  for (BlockPlacement& block : problem.placement.blocks) {
    if (gradients.toss()) block.gradients = Tier::nvme;
  }
  Dice keep(seed + 3'000'017);
  for (BlockPlacement& block : problem.placement.blocks) block.keeps_intermediates = keep.toss();
  Workload& work = problem.workload;
  work.tied = dice.toss();
  // In a third of the problems the vocabulary is cut, in half of these for one pass, if it fits.
  if (seed % 3 == 2) {
    Dice cut(seed + 15'000'013);
    work.vocabulary_tiles =
        cut.pick32(1, static_cast<std::uint32_t>(work.tied ? blocks - 1 : blocks / 2));
    if (cut.toss()) {
      for (BlockPlacement& block : problem.placement.blocks) block.weights = Tier::device;
    }
    for (std::uint32_t b = 0; b < work.vocabulary_tiles; ++b) work.blocks[b].forward_flops = 0.0;
    if (work.vocabulary_tiles > 1) work.rows_bytes = cut.pick(1, 16) * 1024;
    if (work.vocabulary_tiles > 1) work.row_sums_bytes = cut.pick(1, 16) * 1024;
  }
  cut_blocks(work, seed);
  work.tied_accumulator_bytes = work.tied ? 4096 : 0;
  freeze_blocks(work, seed);
  work.activation_bytes = dice.pick(1, 16) * 1024;
  for (BlockWork& block : work.blocks) block.intermediate_bytes = 7 * work.activation_bytes;
  work.batch_bytes = 512;
  work.packed = Dice(seed + 7'000'003).toss();
  work.statistics_bytes = 16;
  work.micro_batch_tokens = 128;
  work.workspace_bytes = 8192;
  work.micro_batches = dice.pick32(1, 5);
  // Of the head and of the routers.
  work.losses_bytes = work.micro_batches * (work.routing_bytes > 0 ? 24 : 8);
  work.evaluation_micro_batches = dice.pick32(1, work.micro_batches);
  problem.options = random_options(dice);
  Dice experts(seed + 23'000'009);
  if (experts.toss()) problem.options.expert_updates = ExpertUpdates::touched;
  problem.options.prefetches_experts = experts.toss();
  Dice speculation(seed + 5'000'011);
  const std::uint64_t usual = speculation.pick(0, 4);  // none, few, half, most, all of them
  for (BlockPlacement& block : problem.placement.blocks) {
    block.speculates = speculation.pick(1, 4) <= usual && block.optimizer != Tier::device &&
                       problem.options.update == Update::gated;
  }
  return problem;
}

/// The same for several ranks and any stage.
inline TestProblem random_problem_of_ranks(std::uint64_t seed) {
  TestProblem problem = random_problem(seed);
  Dice dice(seed + 1'000'003);
  problem.workload.world = dice.pick32(2, 9);
  problem.workload.stage = dice.pick32(0, 3);
  for (BlockWork& block : problem.workload.blocks) {
    const bool in_part = !block.is_frozen() && block.gradient_bytes < block.weight_bytes;
    block.keeps_whole = dice.pick(0, 3) == 0 || in_part;
  }
  Dice sharing(seed + 29'000'029);
  if (sharing.toss()) {
    for (BlockWork& block : problem.workload.blocks) block.expert_parallel = block.is_expert;
  }
  problem.workload.coded_weight = dice.toss() ? 2 : 0;
  const std::uint32_t group = dice.pick32(2, problem.workload.world);
  if (problem.workload.world % group == 0) problem.workload.weight_ranks = group;
  return problem;
}

/// Codes in some layers that are not trained in full.
inline void add_codes(Workload& work, std::uint64_t seed) {
  Dice dice(seed + 29'000'017);
  for (std::uint32_t b = work.first_layer(); b < work.head(); ++b) {
    BlockWork& block = work.blocks[b];
    if (block.gradient_bytes >= block.weight_bytes || dice.toss()) continue;
    block.decoded_bytes = block.weight_bytes * dice.pick(2, 4);
    block.keeps_whole = true;
  }
}

/// A problem for evaluation alone: weights anywhere, nothing else to place.
inline TestProblem random_evaluation(std::uint64_t seed) {
  TestProblem problem =
      Dice(seed + 9'000'011).toss() ? random_problem_of_ranks(seed) : random_problem(seed);
  problem.options.purpose = Purpose::evaluation;
  for (BlockPlacement& block : problem.placement.blocks) block = {.weights = block.weights};
  return problem;
}

/// Plans in the order of a training loop: the initial fill, then steps, sometimes with fewer
/// micro-batches, evaluations and reads of all states, with flushes where pending updates must be
/// applied, and rollbacks after some steps. For Purpose::evaluation only fill, evaluations and
/// reads.
struct RunSequence {
  std::deque<Plan> partial;  ///< plans outside the schedule
  std::vector<const Plan*> runs;
};

inline RunSequence random_runs(const TestProblem& problem, const Schedule& schedule,
                               std::uint64_t seed, std::size_t count) {
  Dice dice(seed + 7'000'001);
  RunSequence sequence;
  bool waiting = false;
  const auto flush = [&] {
    if (waiting) sequence.runs.push_back(&schedule.flush);
    waiting = false;
  };
  const auto add = [&](Plan plan) {
    sequence.partial.push_back(std::move(plan));
    sequence.runs.push_back(&sequence.partial.back());
  };
  const auto blocks = static_cast<std::uint32_t>(problem.workload.blocks.size());
  add(build_fill(with_program(problem.workload), problem.placement, problem.options));
  while (sequence.runs.size() <= count) {
    const bool trains = problem.options.purpose == Purpose::training;
    const auto what = trains ? dice.pick(0, 6) : 6 * dice.pick(0, 1);
    if (what == 6) {
      flush();
      add(build_read(with_program(problem.workload), problem.placement, problem.options, 0,
                     blocks));
      continue;
    }
    if (what == 0) {
      flush();
      sequence.runs.push_back(&schedule.evaluation);
      continue;
    }
    if (what == 1) flush();
    if (what == 2) {
      add(build_partial_step(with_program(problem.workload), problem.placement, problem.options,
                             dice.pick32(1, problem.workload.micro_batches), waiting));
    } else {
      sequence.runs.push_back(waiting || !schedule.steady.leaves_updates ? &schedule.steady
                                                                         : &schedule.first);
    }
    waiting = sequence.runs.back()->leaves_updates;
    if (!schedule.rollback.operations.empty() && dice.pick(0, 2) == 0) {
      sequence.runs.push_back(&schedule.rollback);
      waiting = false;
    }
  }
  flush();
  return sequence;
}

}  // namespace ballast::step
