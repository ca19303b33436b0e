#pragma once

#include <vector>

#include "ballast/engine/home_piece.h"
#include "ballast/engine/saved_states.h"

#include "src/engine/held_block.h"

namespace ballast::engine {

/// Calls `take` with those entries in `piece` that are of this rank's shard when states are split:
/// the same bytes in every stage.
void for_own_entries(const Blueprint& blueprint, const HeldBlock& held, const HomePiece& piece,
                     const StateSink& take);

/// The homes on a tier, without their content, in the order of blocks, weights first.
std::vector<KeptHome> homes_on(const Blueprint& blueprint, Tier tier);
/// The buffer of a home.
plan::BufferId buffer_of(const Blueprint& blueprint, const KeptHome& home);
/// homes_on(host) in the order in which a step first writes to them.
std::vector<KeptHome> host_homes_by_update(const Blueprint& blueprint);
/// Whether the homes on NVMe of two blueprints hold the same ranges.
bool same_homes(const std::vector<KeptHome>& one, const std::vector<KeptHome>& other);

/// Passes the ranges of saved_ranges() to `sink` in this order, each in one or several parts in
/// ascending order.
void save_states(const Blueprint& blueprint, const StateSink& sink, const Perform& perform,
                 step::Homes homes);

/// Writes weights and states of every block to these homes like fill_states(), all of them from
/// `source`: it is asked for this rank's entries of each array, in parts.
void restore_states(const Blueprint& blueprint, const StateSource& source, const Perform& perform,
                    step::Homes homes);

}  // namespace ballast::engine
