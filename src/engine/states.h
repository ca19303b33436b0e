#pragma once

#include <cstdint>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/home_piece.h"
#include "ballast/engine/weight_source.h"

namespace ballast::engine {

/// Writes the initial states of every block to their homes, with the threads of `team`: weights
/// from `source`, moments zero. Asks `source` for the parts of every
/// tensor, all threads for parts that lie close together: once for its weights and, where they have
/// other masters (those of fp16, and of bf16 if the source has more than bf16 values), once for
/// these. All buffers are as the store has allocated them, zeroed.
void fill_states(const Blueprint& blueprint, WeightSource& source, const cpu_adam::Updater& team,
                 const Perform& perform);

/// fp32 master weights of the elements [first, first + count) of `block`, from all `ranks` (nullptr
/// with one rank).
std::vector<float> read_master(const Blueprint& blueprint, comm::Ranks* ranks, std::size_t block,
                               Elems first, Elems count, const Perform& perform);

/// XXH3 over weights and states of all blocks in order, equal on all `ranks` (nullptr with one
/// rank) and in every stage and placement. Throws Error(state) when ranks have different weights.
std::uint64_t hash_states(const Blueprint& blueprint, comm::Ranks* ranks, const Perform& perform);

}  // namespace ballast::engine
