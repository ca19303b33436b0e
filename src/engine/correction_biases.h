#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

/// Correction biases of the routers of a run that moves them (Wang et al., "Auxiliary-Loss-Free
/// Load Balancing Strategy for Mixture-of-Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section
/// 2.1.2). They are fp32 values in host memory, equal on all ranks. Router passes read them instead
/// of the block's tensor, which is frozen and keeps the initial values.
class CorrectionBiases {
 public:
  /// `model` must outlive the object.
  explicit CorrectionBiases(const model::Architecture& model);

  /// Values [experts] by router, in the order of the blocks. Empty while none are set.
  [[nodiscard]] const std::vector<std::vector<float>>& values() const { return values_; }
  void set(const std::vector<std::vector<float>>& values);
  /// Sets the values of all routers from the elements that `read` returns for a tensor of a block.
  void set_from(const std::function<std::vector<float>(std::size_t block,
                                                       const model::TensorSpec& tensor)>& read);

  /// Adds `speed` to the bias of each expert with less than the mean of its layer's rows, and
  /// subtracts it from that of each expert with more. `rows`: StepResult::expert_rows. Does nothing
  /// while no values are set. Call it when no router pass is pending.
  void move(const std::vector<std::vector<std::uint64_t>>& rows, double speed);

  /// Returns the values for the router in `block`, for PassArguments::correction_biases; empty for
  /// other blocks and while none are set.
  [[nodiscard]] std::span<const float> of(std::size_t block) const;
  /// Replaces the elements of the biases' tensor among `elements`, which are those of `block` from
  /// `first` on, by the present values.
  void replace_in(std::size_t block, Elems first, std::span<float> elements) const;

 private:
  const model::Architecture& model_;
  std::vector<std::size_t> blocks_;  ///< routers with correction biases
  std::vector<std::vector<float>> values_;
};

}  // namespace ballast::engine
