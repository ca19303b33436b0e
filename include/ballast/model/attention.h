#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "ballast/core/units.h"

namespace ballast::device {
class Device;
}

namespace ballast::model {

/// Extents of causal attention with grouped queries.
struct AttentionShape {
  std::size_t sequences = 1;
  std::size_t length = 1;
  std::size_t heads = 1;
  std::size_t kv_heads = 1;  ///< divides heads
  std::size_t head_dim = 64;

  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  /// Row length of the queries, and of the results.
  [[nodiscard]] constexpr std::size_t width() const { return heads * head_dim; }
  [[nodiscard]] constexpr std::size_t kv_width() const { return kv_heads * head_dim; }
  /// Row length of [tokens, queries | keys | values].
  [[nodiscard]] constexpr std::size_t row() const { return width() + 2 * kv_width(); }
  /// Numbers in the logarithms of all rows' sums.
  [[nodiscard]] constexpr std::size_t log_sums() const { return tokens() * heads; }
};

enum class AttentionPass { own_forward, own_backward, cudnn_forward };

/// Floating-point operations of a pass. A product of two matrices of all pairs of places takes 2
/// sequences x heads x length^2 x head_dim, and a causal mask spares half of it; the forward pass
/// has two of them (scores, results), the backward pass five (scores again, and the gradients of
/// probabilities, values, queries and keys). Additions of the softmax do not count.
double attention_flops(const AttentionShape& shape, AttentionPass pass);

/// Attention in bf16 over random numbers of one shape on the CUDA device, to be timed: our own
/// kernels beside cuDNN's.
class AttentionTrial {
 public:
  virtual ~AttentionTrial() = default;
  AttentionTrial() = default;
  AttentionTrial(const AttentionTrial&) = delete;
  AttentionTrial& operator=(const AttentionTrial&) = delete;

  /// Why cuDNN attention is unavailable, one line; empty where it is available. Without it
  /// there is no cudnn_forward.
  [[nodiscard]] virtual std::string cudnn_refusal() const = 0;
  /// Enqueues the pass `count` times and waits for all. own_backward goes on with the results of
  /// the forward pass before it. Throws Error(device).
  virtual void run(AttentionPass pass, std::size_t count) = 0;
};

/// Memory of the device that make_attention_trial() allocates.
Bytes attention_trial_bytes(const AttentionShape& shape);

/// `device`, a CUDA device, must outlive it. Throws Error(usage) for a shape that the kernels
/// cannot do, Error(device) where this program has no CUDA, and what allocations throw.
std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionShape& shape);

}  // namespace ballast::model
