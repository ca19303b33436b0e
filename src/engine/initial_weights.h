#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_states.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

/// Calls `work(from, to)` for the parts of [0, count) in ascending order on all threads of `team`,
/// so that the threads work on neighbouring parts.
template <class Work>
void in_units(const cpu_adam::Updater& team, std::uint64_t count, std::uint64_t unit, Work work) {
  std::atomic<std::uint64_t> next = 0;
  team.for_ranges(static_cast<Elems>(team.threads()), [&](Elems, Elems) {
    for (auto from = next.fetch_add(unit); from < count; from = next.fetch_add(unit)) {
      work(from, std::min(count, from + unit));
    }
  });
}

/// Initial values of DoRA's magnitudes (model::AdapterConfig): the norms of their maps, as passes
/// read these, summed in double. They are kept during the fill, outside the ledger: 4 bytes per
/// output of an adapted map.
class InitialMagnitudes {
 public:
  /// Writes the values of elements [first, first + out.size()) of a map, as passes read them.
  /// Called by several threads.
  using ReadMap =
      std::function<void(const model::TensorSpec& map, Elems first, std::span<float> out)>;

  InitialMagnitudes(const model::Architecture& model, const cpu_adam::Updater& team)
      : model_(model), team_(team) {}

  /// Returns whether make() has something to do for the block.
  [[nodiscard]] bool lacks(const model::BlockSpec& block) const;
  /// Computes the magnitudes of the block on all threads.
  void make(const model::BlockSpec& block, const ReadMap& read);
  /// Copies values of a tensor from element `first` on, after make() of its block.
  void copy(const model::TensorSpec& tensor, Elems first, std::span<float> out) const;

 private:
  const model::Architecture& model_;
  const cpu_adam::Updater& team_;
  std::map<std::string, std::vector<float>> norms_;  ///< by name of the tensor
};

/// Compares the weights of which all sharers keep the whole, while a plan fills the homes. Sharers
/// that read different files would otherwise train different replicas without noticing.
class WholeWeights {
 public:
  /// Without `ranks` (nullptr), nothing is compared. Both arguments must outlive the object.
  WholeWeights(const Blueprint& blueprint, comm::Ranks* ranks);

  /// Returns a Perform that also hashes the filled pieces of whole weights.
  [[nodiscard]] Perform hashing(const Perform& perform);

  /// Throws a comm::JointError(data) that names a rank and a block if sharers have different
  /// weights. Collective.
  void require_equal() const;

 private:
  void add(const HomePiece& piece);

  const Blueprint& blueprint_;
  comm::Ranks* ranks_;
  std::vector<std::uint64_t> digests_;  ///< by block; 0 for blocks that were not filled
};

}  // namespace ballast::engine
