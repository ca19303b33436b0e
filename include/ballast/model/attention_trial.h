#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ballast/core/units.h"
#include "ballast/device/device.h"

namespace ballast::model {

/// Extents of causal attention: a micro-batch of sequences, query heads and those of keys and
/// values, each of so many values.
struct AttentionExtents {
  std::uint64_t sequences = 1;
  std::uint64_t length = 1;
  std::uint64_t heads = 1;
  std::uint64_t kv_heads = 1;  ///< divides heads
  std::uint64_t head_size = 64;
};

enum class AttentionPass { own_forward, own_backward, cudnn_forward };

/// Floating-point operations of a pass. A product of two matrices of all pairs of places takes 2
/// sequences x heads x length^2 x head_size, and a causal mask spares half of it; the forward pass
/// has two of them (scores, results), the backward pass five (scores again, and the gradients of
/// probabilities, values, queries and keys). Additions of the softmax do not count.
double attention_flops(const AttentionExtents& extents, AttentionPass pass);

/// Attention in bf16 over random numbers of one shape on the CUDA device, to be timed: our own
/// kernels beside cuDNN's.
class AttentionTrial {
 public:
  virtual ~AttentionTrial() = default;
  AttentionTrial() = default;
  AttentionTrial(const AttentionTrial&) = delete;
  AttentionTrial& operator=(const AttentionTrial&) = delete;

  /// Empty, or why cuDNN attends not: one line. Then there is no cudnn_forward.
  [[nodiscard]] virtual std::string cudnn_refusal() const = 0;
  /// Enqueues the pass `count` times and waits for all. own_backward goes on with the results of
  /// the forward pass before it. Throws Error(device).
  virtual void run(AttentionPass pass, std::size_t count) = 0;
};

/// Memory of the device that make_attention_trial() allocates.
Bytes attention_trial_bytes(const AttentionExtents& extents);

/// `device`, a CUDA device, must outlive it. Throws Error(usage) for extents that the kernels
/// cannot do, Error(device) where this program has no CUDA, and what allocations throw.
std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionExtents& extents);

}  // namespace ballast::model
