#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// Shape of one micro-batch: `sequences` x `length` tokens, row-major.
struct MicroBatchShape {
  std::uint64_t sequences = 1;
  std::uint64_t length = 1;  ///< tokens per sequence on this rank
  /// Ranks that share the sequences (sequence parallelism). Each has `length` consecutive tokens of
  /// each sequence.
  std::uint64_t parts = 1;
  [[nodiscard]] std::uint64_t tokens() const { return sequences * length; }
  /// Tokens per sequence on all ranks together.
  [[nodiscard]] std::uint64_t whole_length() const { return length * parts; }
};

/// Number of losses that the last router of a micro-batch reports: load balancing and z.
inline constexpr std::uint64_t kRouterLosses = 2;

/// Bytes of the softmax sum of a row of logits (RowSum<float> of the kernels).
inline constexpr Bytes kRowSumBytes = 16;

/// Values per partial GradientStats of a measured gradient.
inline constexpr std::uint64_t kStatsChunk = 65536;

/// Device memory that kernels need in addition to weights, activations and gradients.
struct KernelSizes {
  /// Bytes for the intermediates of the largest block, including recomputation. Linear in the
  /// sequence length. Logits and the arrays of a layer's MLP are bounded, because they exist only
  /// for a chunk of rows at a time.
  Bytes workspace = 0;
  /// Bytes (whole pages) to keep the intermediates of one micro-batch, by block: for layers in one
  /// piece, and for the first block of a head with several tiles (Kernel::head_train). 0 for other
  /// blocks.
  std::vector<Bytes> intermediates;
  /// Bytes (whole pages) of Port::kept_attention for one micro-batch, by block: the results of
  /// attention and of the map after it. 0 for blocks that cannot keep them alone.
  std::vector<Bytes> attention;
  /// Bytes of Port::normed: data per row that is kept between the tiles of the head or of a layer.
  /// 0 without tiles.
  Bytes rows = 0;
  /// Bytes of Port::partial_sums for one tensor place: fp32 sums of an activation and, if layers in
  /// tiles have norms of heads, the parts of their gradients.
  Bytes sums = 0;
  std::uint64_t experts = 0;        ///< per layer; 0: no layer has experts
  std::uint64_t router_totals = 0;  ///< size of Port::router_totals
  /// Bytes of the accumulators that Compute::clear_gradient() sets to zero, by block.
  std::vector<Bytes> cleared;
};

}  // namespace ballast::model
