#pragma once

#include <random>

#include <fmt/format.h>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// A schedule problem: any sizes, placements and options that build() accepts.
struct Problem {
  Workload workload;
  Placement placement;
  Options options;
};

inline Problem random_problem(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t low, std::uint64_t high) {
    return low + random() % (high - low + 1);
  };
  Problem problem;
  const auto blocks = pick(2, 7);
  for (std::uint64_t b = 0; b < blocks; ++b) {
    const Bytes elements = pick(1, 20) * 2048;
    problem.workload.blocks.push_back({.name = fmt::format("block {}", b),
                                       .weight_bytes = 2 * elements,
                                       .accumulator_bytes = 4 * elements,
                                       .gradient_bytes = 2 * elements,
                                       .state_bytes = 10 * elements,
                                       .forward_flops = b == 0 ? 0.0 : 100.0,
                                       .update_traffic = 26 * elements});
    problem.placement.blocks.push_back({.weights = kTiers[pick(0, 2)],
                                        .optimizer = kTiers[pick(0, 2)],
                                        .activations = kTiers[pick(0, 2)]});
  }
  problem.workload.tied = pick(0, 1) == 1;
  problem.workload.tied_accumulator_bytes = problem.workload.tied ? 4096 : 0;
  problem.workload.activation_bytes = pick(1, 4) * 4096;
  problem.workload.batch_bytes = 512;
  problem.workload.losses_bytes = 64;
  problem.workload.statistics_bytes = 16;
  problem.workload.micro_batch_tokens = 128;
  problem.workload.workspace_bytes = 8192;
  problem.workload.micro_batches = static_cast<std::uint32_t>(pick(1, 4));
  problem.workload.evaluation_micro_batches =
      static_cast<std::uint32_t>(pick(1, problem.workload.micro_batches));
  problem.options.order = pick(0, 1) == 1 ? Order::layer_major : Order::micro_batch_major;
  problem.options.weight_slots = static_cast<std::uint32_t>(pick(2, 4));
  problem.options.update = pick(0, 1) == 1 ? Update::gated : Update::eager;
  problem.options.weight_staging = static_cast<std::uint32_t>(pick(1, 3));
  problem.options.state_staging = static_cast<std::uint32_t>(pick(1, 3));
  problem.options.activation_staging = static_cast<std::uint32_t>(pick(1, 3));
  return problem;
}

}  // namespace ballast::schedule
