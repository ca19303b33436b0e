#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/engine/blueprint.h"
#include "ballast/plan/timeline.h"

namespace ballast::tools {

/// Model FLOPs of one training step of this rank: forward passes, and backward passes at twice
/// that. 6 per token and parameter of a multiplied matrix (not of the embedding's lookup), and
/// attention's products over the causal half of the square. Without recomputation.
double model_flops_of_step(const engine::Blueprint& blueprint);

/// One kind of operation: a pass of one micro-batch through one block.
struct TimedPass {
  std::string name;       ///< "layer forward", or "layer 3 forward" if there are several kinds
  std::string_view key;   ///< "layer_forward"
  std::string block;      ///< name of the first such block
  std::size_t count = 0;  ///< timed operations
  double seconds = 0.0;   ///< median of one operation, as the executor measures it
  double flops = 0.0;     ///< FLOPs of one operation's matrix products
  [[nodiscard]] double flops_per_second() const { return flops / seconds; }
};

/// Passes through layers and the head in `timeline`. Layers with equal numbers of products are one
/// kind, such as attention or gated delta nets, if they keep or recompute intermediates alike. The
/// first layer of each number gives its name.
std::vector<TimedPass> time_passes(const plan::Timeline& timeline,
                                   const engine::Blueprint& blueprint);

}  // namespace ballast::tools
