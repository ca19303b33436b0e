#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// The kernels of the CUDA device. The sets differ in the bits of their results.
enum class KernelSet {
  best,  ///< the fastest for the GPU, with cuBLASLt's products
  /// Ballast's simplest kernels: no tensor cores, no asynchronous copies, no library. Ten to fifty
  /// times slower. For comparisons that find a wrong kernel, and for GPUs without cuBLASLt.
  plain,
};

/// Checks of the work of the CUDA device.
enum class GpuChecks {
  off,
  /// Waits for every kernel and library call, and searches the results of passes for values that
  /// are not finite. Errors name the kernel and its shape.
  each,
};

/// The attention implementation of the CUDA device: Ballast's kernels, or cuDNN for the bf16
/// forward pass. The implementations differ in the bits of their results.
enum class AttentionBackend {
  best,   ///< cuDNN if available
  own,    ///< Ballast's kernels
  cudnn,  ///< cuDNN; an Error if it is not available
};

/// Shape of one micro-batch: `sequences` x `length` tokens, row-major.
struct MicroBatchShape {
  std::uint64_t sequences = 1;
  std::uint64_t length = 1;  ///< tokens per sequence on this rank
  /// Ranks that share the sequences (sequence parallelism). Each has `length` consecutive tokens of
  /// each sequence.
  std::uint64_t slices = 1;
  [[nodiscard]] std::uint64_t tokens() const { return sequences * length; }
  /// Tokens per sequence on all ranks together.
  [[nodiscard]] std::uint64_t whole_length() const { return length * slices; }
};

/// Number of losses that the routers of a micro-batch report: load balancing and z.
inline constexpr std::uint64_t kRouterLosses = 2;

/// The rows over which the router losses are computed. They are products of means, so the mean of
/// the losses of parts is another function than the loss of all rows.
enum class RouterLossSpan : std::uint8_t {
  step,        ///< all micro-batches and ranks, as if the step were one batch
  micro_batch  ///< each micro-batch of each rank; the loss is their mean
};

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
  /// tiles have norms of heads, the slices of their gradients.
  Bytes sums = 0;
  std::uint64_t experts = 0;        ///< per layer; 0: no layer has experts
  std::uint64_t router_totals = 0;  ///< size of Port::router_totals
  /// Bytes of the accumulators that Compute::clear_gradient() sets to zero, by block.
  std::vector<Bytes> cleared;
};

/// Target of a row without a loss: a token of a prompt, or the last one of a document.
inline constexpr std::int32_t kIgnoredTarget = -1;
/// Target of a padding row, which belongs to no document. Routers send it to no expert.
inline constexpr std::int32_t kPaddingTarget = -2;

/// Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290, equation 7).
struct Preference {
  double beta = 0.1;             ///< weight of a reward
  double label_smoothing = 0.0;  ///< probability that a pair's labels are swapped
};

/// The head's result for one pair. A reward is beta * (log pi - log ref) of a completion.
struct PairResult {
  double loss = 0.0;  ///< -log sigmoid(chosen - rejected), smoothed
  double chosen = 0.0;
  double rejected = 0.0;
  double correct = 0.0;  ///< 1 if the chosen completion has the larger reward
};

/// Activation functions of MLPs, with or without a gate. Their formulas are in compute/formulas.h.
enum class Activation { gelu_tanh, gelu, silu, relu_squared, last = relu_squared };

/// Rows of a sequence that the recurrence of a gated delta net computes together.
inline constexpr std::size_t kDeltaChunk = 64;

}  // namespace ballast::model
