#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

/// A kind of state that is neither a weight nor a state of the optimizer: lists of fp32 values in
/// host memory, equal on all ranks, for the blocks that have a certain frozen tensor. Passes read
/// them instead of that tensor, which keeps the initial values. Checkpoints have them by name, the
/// hash of a run depends on them, and saved weights have them in the place of the tensor. A kind
/// needs a row here, a rule that changes its values, and a pass that reads them.
struct SideStateKind {
  std::string_view name;  ///< the key in a checkpoint
  /// Returns the tensor of a block; null: the block has none.
  const model::TensorSpec* (*tensor)(const model::BlockSpec& block);
};
/// Correction biases of routers (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
/// Mixture-of-Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2): [experts].
inline constexpr SideStateKind kCorrectionBiases = {"correction_biases", model::correction_biases};
inline constexpr std::array kSideStates = {kCorrectionBiases};

/// Lists of values by name of their kind, in the order of the blocks. Kinds without values have no
/// entry.
using SideValues = std::map<std::string, std::vector<std::vector<float>>, std::less<>>;

/// Returns the hash of weights and states together with side states: `states` if there are none.
std::uint64_t hash_with(std::uint64_t states, const SideValues& side);

/// The side states of a run.
class SideStates {
 public:
  /// `model` must outlive the object.
  explicit SideStates(const model::Architecture& model) : model_(model) {}

  [[nodiscard]] const SideValues& values() const { return values_; }
  /// Throws std::logic_error if the model has another number of lists or of values in one.
  void set(SideValues values);
  /// Sets the values of a kind from the elements that `read` returns for a tensor of a block.
  void set_from(const SideStateKind& kind,
                const std::function<std::vector<float>(std::size_t block,
                                                       const model::TensorSpec& tensor)>& read);
  [[nodiscard]] bool has(const SideStateKind& kind) const {
    return values_.find(kind.name) != values_.end();
  }

  /// Adds `speed` to the correction bias of each expert with less than the mean of its layer's
  /// rows, and subtracts it from that of each expert with more. `rows`: StepResult::expert_rows.
  /// Does nothing while no biases are set. Call it when no router pass is pending.
  void balance(const std::vector<std::vector<std::uint64_t>>& rows, double speed);

  /// Returns the values for a block; empty if it has none or none are set.
  [[nodiscard]] std::span<const float> of(const SideStateKind& kind, std::size_t block) const;
  /// Replaces elements whose tensors have side states by the present values. `elements`: those of
  /// `block` from `first` on.
  void replace_in(std::size_t block, Elems first, std::span<float> elements) const;

 private:
  /// Blocks of the model with a kind.
  [[nodiscard]] std::vector<std::size_t> blocks_with(const SideStateKind& kind) const;

  const model::Architecture& model_;
  SideValues values_;
};

}  // namespace ballast::engine
