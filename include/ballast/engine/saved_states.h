#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/state_range.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"

namespace ballast::engine {

/// A home on NVMe that a checkpoint keeps in place.
struct KeptHome {
  std::size_t block = 0;
  bool states = false;  ///< states or weights
  /// Sub-group of states. For weights: 1 for the frozen ones, if the trained ones have a separate
  /// home.
  std::uint32_t sub_group = 0;
  state::KeptExtent content;
  /// This rank's part of the arrays in the home, each with the offset of its first byte.
  std::vector<std::pair<StateRange, Bytes>> ranges;
};

/// States that a checkpoint keeps in the swap files of a rank.
struct KeptStates {
  state::SwapImage image;
  std::vector<KeptHome> homes;
};

/// Returns all arrays of all blocks that are not empty, whole, as all ranks together keep them.
std::vector<StateRange> whole_ranges(const Blueprint& blueprint);

/// Returns this rank's part of weights and states on `homes`: its shards of all arrays, in block
/// order, weights first. The parts of all ranks make up the whole.
std::vector<StateRange> saved_ranges(const Blueprint& blueprint, step::Homes homes = {});
/// Returns the ranges in host memory, in the order in which a step first writes to them.
std::vector<StateRange> background_ranges(const Blueprint& blueprint);

/// Receives the bytes of a range. May throw.
using StateSink = std::function<void(const StateRange& range, ConstHostBytes bytes)>;
/// Writes the bytes of a range to `bytes`. Throws Error if it has none.
using StateSource = std::function<void(const StateRange& range, HostBytes bytes)>;

/// Returns the hash of weights and states together with the correction biases that a run has moved
/// (Engine::correction_biases()): `states` if there are none.
std::uint64_t hash_with_biases(std::uint64_t states, const std::vector<std::vector<float>>& biases);

}  // namespace ballast::engine
