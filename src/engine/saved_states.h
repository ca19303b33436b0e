#pragma once

#include <vector>

#include "ballast/engine/home_piece.h"
#include "ballast/engine/saved_states.h"

#include "src/engine/held_block.h"

namespace ballast::engine {

/// Calls `take` with the entries in `piece` that belong to this rank's shard if states are split.
/// The bytes are equal in every stage.
void for_own_entries(const Blueprint& blueprint, const HeldBlock& held, const HomePiece& piece,
                     const StateSink& take);

/// Returns the homes on a tier, without their content, in block order, weights first.
std::vector<KeptHome> homes_on(const Blueprint& blueprint, Tier tier);
/// Returns the buffer of a home.
plan::BufferId buffer_of(const Blueprint& blueprint, const KeptHome& home);
/// Returns homes_on(host) in the order in which a step first writes to them.
std::vector<KeptHome> host_homes_by_update(const Blueprint& blueprint);
/// Returns whether the homes on NVMe of two blueprints contain the same ranges.
bool same_homes(const std::vector<KeptHome>& one, const std::vector<KeptHome>& other);

/// Passes the ranges of saved_ranges() to `sink` in this order, each in one or several parts in
/// ascending order.
void save_states(const Blueprint& blueprint, const StateSink& sink, const Perform& perform,
                 step::Homes homes);

/// Writes weights and states of every block to these homes like fill_states(), all from `source`,
/// in parts, for this rank's entries of each array.
void restore_states(const Blueprint& blueprint, const StateSource& source, const Perform& perform,
                    step::Homes homes);

}  // namespace ballast::engine
