#pragma once

#include <cstdint>

#include "src/model/spec/program_shape.h"
#include "tests/support/workload.h"

namespace ballast::step {

/// The role of a block by its flags.
inline model::BlockRole role_of(const Workload& work, std::uint32_t block) {
  using model::BlockRole;
  const BlockWork& one = work.blocks[block];
  if (work.is_embedding(block)) return BlockRole::embedding;
  if (block == work.head()) return BlockRole::head;
  if (!work.is_layer(block)) return BlockRole::head_tile;
  if (!work.is_part_of_layer(block)) return BlockRole::layer;
  if (!one.continues) {
    if (one.routes) return BlockRole::router;
    return one.mid_layer ? BlockRole::mid_norm : BlockRole::norm;
  }
  if (one.is_expert) {
    return one.expert_parallel ? BlockRole::exchanged_expert : BlockRole::expert;
  }
  return work.blocks[work.first_tile(block)].routes ? BlockRole::shared_expert : BlockRole::tile;
}

/// The sizes of a random workload as those of a program.
inline model::ProgramShape shape_of(const Workload& work) {
  model::ProgramShape shape = {.tied = work.tied,
                               .packed = work.packed,
                               .pairs = work.has_reference(),
                               .first_differentiated = work.first_differentiated,
                               .activation = work.activation_bytes,
                               .batch = work.batch_bytes,
                               .rows = work.rows_bytes,
                               .row_sums = work.row_sums_bytes,
                               .tied_gradient = work.tied_accumulator_bytes,
                               .routing = work.routing_bytes,
                               .router_totals = work.router_totals_bytes,
                               .losses = 8,
                               .router_losses = 16,
                               .pair_results = work.pairs_bytes,
                               .ranks = work.world};
  std::uint32_t expert = 0;
  for (std::uint32_t b = 0; b < work.blocks.size(); ++b) {
    const BlockWork& one = work.blocks[b];
    expert = one.is_expert ? expert + 1 : 0;
    shape.blocks.push_back({.name = one.name,
                            .role = role_of(work, b),
                            .forward_flops = one.forward_flops,
                            .recomputed_flops = one.recomputed_flops,
                            .frozen_flops = one.frozen_flops,
                            .norm_traffic = one.norm_traffic,
                            .intermediates = one.intermediate_bytes,
                            .gradient = one.accumulator_bytes,
                            .cleared = one.cleared_bytes,
                            .token_share = one.token_share,
                            .expert = one.is_expert ? expert - 1 : 0,
                            .alike = b});
  }
  return shape;
}

}  // namespace ballast::step
