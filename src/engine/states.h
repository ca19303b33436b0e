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
/// from `source`, moments zero. Reads parts of every tensor from `source`, with all threads working
/// on neighbouring parts: once for its weights and, if they have other masters (for fp16, and for
/// bf16 if the source has more than bf16 values), once for these. All buffers must be zeroed, as
/// the store allocates them.
void fill_states(const Blueprint& blueprint, WeightSource& source, const cpu_adam::Updater& team,
                 const Perform& perform);

/// Returns fp32 master weights of the elements [first, first + count) of `block`, from all `ranks`
/// (nullptr with one rank).
std::vector<float> read_master(const Blueprint& blueprint, comm::Ranks* ranks, std::size_t block,
                               Elems first, Elems count, const Perform& perform);

/// Returns the XXH3 over weights and states of all blocks in order, equal on all `ranks` (nullptr
/// with one rank) and in every stage and placement. Throws Error(state) if ranks have different
/// weights.
std::uint64_t hash_states(const Blueprint& blueprint, comm::Ranks* ranks, const Perform& perform);

}  // namespace ballast::engine
