#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// Shape of one micro-batch: `sequences` x `length` tokens, rows in that order.
struct MicroBatchShape {
  std::uint64_t sequences = 1;
  std::uint64_t length = 1;
  [[nodiscard]] std::uint64_t tokens() const { return sequences * length; }
};

/// Losses that the last router reports of a micro-batch: load balance, z.
inline constexpr std::uint64_t kRouterLosses = 2;

/// Values per partial GradientStats of a measured gradient.
inline constexpr std::uint64_t kStatsChunk = 65536;

/// Device memory that kernels need besides weights, activations and gradients.
struct KernelSizes {
  /// Bytes for the intermediates of the largest block, including recompute; linear in sequence
  /// length. Logits and the arrays of a layer's MLP have an upper limit: they exist for a chunk of
  /// rows at a time.
  Bytes workspace = 0;
  /// By block: bytes (whole pages) to keep the intermediates of one micro-batch, for layers in one
  /// piece; for the first block of a head of several tiles: bytes for Kernel::head_train;
  /// 0 for other blocks.
  std::vector<Bytes> intermediates;
  /// Bytes of Port::normed: what is known of the rows between visits to tiles, of the head or of
  /// layers; 0 without tiles.
  Bytes rows = 0;
  std::uint64_t experts = 0;        ///< of a layer; 0: no layer has any
  std::uint64_t router_totals = 0;  ///< numbers of Port::router_totals
  /// By block: bytes of the accumulators that Compute::clear_gradient() sets to zero.
  std::vector<Bytes> cleared;
};

}  // namespace ballast::model
