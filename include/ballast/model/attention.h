#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ballast/core/units.h"

namespace ballast::device {
class Device;
}

namespace ballast::model {

/// The preceding keys that a query sees.
struct AttentionMask {
  std::size_t window = 0;  ///< the last `window` keys including its own; 0: all
  /// Position of each token in its document [sequences, length], in device memory. A query sees
  /// only its document. Null: every sequence is one document.
  const std::int32_t* positions = nullptr;

  /// Returns the mask of one sequence.
  [[nodiscard]] constexpr AttentionMask of(std::size_t sequence, std::size_t length) const {
    return {window, positions == nullptr ? nullptr : positions + sequence * length};
  }
  /// Returns the first key that a query of the first sequence sees. It never decreases with the
  /// query.
  [[nodiscard]] constexpr std::size_t first_key(std::size_t query) const {
    const std::size_t first = window == 0 || query < window ? 0 : query + 1 - window;
    if (positions == nullptr) return first;
    const std::size_t start = query - static_cast<std::size_t>(positions[query]);
    return first < start ? start : first;
  }
};

/// One logit per head that takes part in the softmax of all queries of the head but has no value,
/// so that the probabilities of the keys add up to less than 1. Scores are scaled, sinks are not.
/// Source: OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, on attention.
template <class T>
struct AttentionSinks {
  const T* logits = nullptr;  ///< [heads]; null: no sinks
  float* gradient = nullptr;  ///< [heads], the backward pass adds to it; null: no gradient wanted
};

/// Extents of causal attention with grouped queries.
struct AttentionShape {
  std::size_t sequences = 1;
  std::size_t length = 1;  ///< rows per sequence
  std::size_t heads = 1;
  std::size_t kv_heads = 1;  ///< divides heads
  std::size_t head_dim = 64;
  AttentionMask mask;
  double scale = 0.0;  ///< factor of the scores; 0: 1 / sqrt(head_dim)
  /// Soft cap: scaled scores s become cap * tanh(s / cap) before the mask; 0: none. Source: Gemma
  /// Team, "Gemma 2", 2024, section 2.
  double cap = 0.0;
  std::size_t slices = 1;  ///< MicroBatchShape::slices: a sequence has slices * length rows
  /// Columns of a head of values before its padding, 0: all. Values in the padding are zeros, and
  /// so are gradients of results there. Kernels write zeros there and need not compute them.
  std::size_t value_dim = 0;

  [[nodiscard]] constexpr std::size_t value_columns() const {
    return value_dim == 0 ? head_dim : value_dim;
  }
  [[nodiscard]] constexpr std::size_t whole_length() const { return slices * length; }
  /// Returns the extents of attention after the exchange of heads against rows: whole sequences,
  /// and 1 / slices of the heads. `slices` must divide kv_heads.
  [[nodiscard]] constexpr AttentionShape by_heads() const {
    AttentionShape shape = *this;
    shape.length = whole_length();
    shape.heads = heads / slices;
    shape.kv_heads = kv_heads / slices;
    shape.slices = 1;
    return shape;
  }
  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  /// Row length of the queries, and of the results.
  [[nodiscard]] constexpr std::size_t width() const { return heads * head_dim; }
  [[nodiscard]] constexpr std::size_t kv_width() const { return kv_heads * head_dim; }
  /// Row length of [tokens, queries | keys | values].
  [[nodiscard]] constexpr std::size_t row() const { return width() + 2 * kv_width(); }
  [[nodiscard]] float score_scale() const {
    return static_cast<float>(scale != 0.0 ? scale
                                           : 1.0 / std::sqrt(static_cast<double>(head_dim)));
  }
  /// Number of log-sums: one per row of scores.
  [[nodiscard]] constexpr std::size_t log_sums() const { return tokens() * heads; }
};

enum class AttentionPass { own_forward, own_backward, cudnn_forward };

/// Floating-point operations of a pass. One matrix product takes 2 x sequences x heads x length^2 x
/// head_dim, half of that with the causal mask. The forward pass has two (scores, results), the
/// backward pass five (recomputed scores, gradients of probabilities, values, queries and keys).
/// The softmax is not counted.
double attention_flops(const AttentionShape& shape, AttentionPass pass);

/// Benchmark of bf16 attention on random numbers on the CUDA device, with Ballast's kernels and
/// with cuDNN.
class AttentionTrial {
 public:
  virtual ~AttentionTrial() = default;
  AttentionTrial() = default;
  AttentionTrial(const AttentionTrial&) = delete;
  AttentionTrial& operator=(const AttentionTrial&) = delete;

  /// Returns the reason why cuDNN attention is unavailable, in one line. Empty if cudnn_forward may
  /// be used.
  [[nodiscard]] virtual std::string cudnn_refusal() const = 0;
  /// Runs the pass `count` times and waits. own_backward uses the results of the preceding forward
  /// pass. Throws Error(device).
  virtual void run(AttentionPass pass, std::size_t count) = 0;
};

/// Bytes of device memory that make_attention_trial() allocates.
Bytes attention_trial_bytes(const AttentionShape& shape);

/// Makes the trial. `device`, a CUDA device, must outlive it. Throws Error(usage) for an
/// unsupported shape, Error(device) in a build without CUDA, and the errors of allocations.
std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionShape& shape);

}  // namespace ballast::model
