#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "ballast/engine/blueprint.h"
#include "ballast/schedule/timeline.h"

namespace ballast::tools {

/// FLOPs that one training step of this rank takes of the model: forward passes, and backward ones
/// at twice that. 6 per token and parameter of a matrix that is multiplied with (an embedding's
/// rows are only looked up), and attention's products over the causal half of the square. What is
/// computed again in the backward pass is none of it.
double model_flops_of_step(const engine::Blueprint& blueprint);

/// One kind of operation: a pass of one micro-batch through one block.
struct Pass {
  std::string_view name;  ///< "layer forward"
  std::string_view key;   ///< "layer_forward"
  std::size_t count = 0;  ///< operations that were timed
  double seconds = 0.0;   ///< of one, median, as the executor sees it
  double flops = 0.0;     ///< of the products that one computes
  [[nodiscard]] double flops_per_second() const { return flops / seconds; }
};

/// Passes through layers and the head that `timeline` has spans of. Layers are alike, and so their
/// operations are one kind: of those that do with their intermediates what the first one does.
std::vector<Pass> time_passes(const schedule::Timeline& timeline,
                              const engine::Blueprint& blueprint);

}  // namespace ballast::tools
