#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/engine/blueprint.h"
#include "ballast/plan/lane_times.h"

namespace ballast::tools {

/// One row of a breakdown: all calls of one kernel.
struct KernelRow {
  std::string name;  ///< group, or M x N x K of a product
  std::string_view group;
  std::size_t calls = 0;
  double seconds = 0.0;
  double flops = 0.0;  ///< 2 M N K of a product, otherwise 0
  [[nodiscard]] double flops_per_second() const { return seconds > 0.0 ? flops / seconds : 0.0; }
};

/// Divides the time from `start` to `end` among kernels. A moment belongs to the kernel that began
/// last among those running. An update only has the moments in which nothing else computes. The
/// last row, "rest", has the moments without any kernel. Other rows are sorted by time, products
/// first. Seconds of all rows sum to end - start.
std::vector<KernelRow> break_down(const std::vector<KernelSpan>& spans, KernelTime start,
                                  KernelTime end);

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
