#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ballast/cpu_adam/updater.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

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

}  // namespace ballast::engine
