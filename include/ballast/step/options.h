#pragma once

#include <algorithm>
#include <cstdint>

namespace ballast::step {

enum class Order : std::uint8_t {
  layer_major,        ///< every micro-batch of a block before the next block
  micro_batch_major,  ///< every block of a micro-batch before the next micro-batch
  /// Micro-batch-major. The gradient sums of a block are in host memory between the backward passes
  /// of two micro-batches.
  micro_batch_major_offload
};

enum class Update : std::uint8_t {
  gated,  ///< after the global gradient norm is known: during the next step's forward pass
  eager   ///< once the block's gradient is complete: during the backward pass
};

/// The experts that a step updates.
enum class ExpertUpdates : std::uint8_t {
  all,    ///< all experts: without rows, their gradients are zero
  active  ///< experts with tokens in the step; the others keep weights and moments
};

/// Intermediates of a layer that stay from its forward to its backward pass. The backward pass
/// recomputes the rest.
enum class Kept : std::uint8_t {
  nothing,
  attention,  ///< results of attention and of the map after it, in the tier of activations
  all         ///< all intermediates, on the device
};

enum class Purpose : std::uint8_t {
  training,
  /// Only losses: weights, one activation per micro-batch and a workspace. No optimizer states,
  /// gradients or inputs for a backward pass.
  evaluation
};

/// Numbers of buffers for data in transit, each at least 1.
struct BufferCounts {
  std::uint32_t weight_slots = 2;        ///< on the device, for weights
  std::uint32_t gradient_slots = 2;      ///< on the device, for gradients
  std::uint32_t weight_staging = 3;      ///< on the host, for weights
  std::uint32_t state_staging = 3;       ///< on the host, for states from NVMe
  std::uint32_t activation_staging = 3;  ///< on the host, for activations to NVMe
  std::uint32_t gradient_staging = 3;    ///< on the host, for gradients to NVMe

  [[nodiscard]] std::uint32_t smallest() const {
    return std::min({weight_slots, gradient_slots, weight_staging, state_staging,
                     activation_staging, gradient_staging});
  }
  friend bool operator==(const BufferCounts&, const BufferCounts&) = default;
};

struct Options {
  Purpose purpose = Purpose::training;
  Order order = Order::layer_major;
  Update update = Update::gated;
  ExpertUpdates expert_updates = ExpertUpdates::all;
  /// Prefetches weights of experts before their router has chosen: experts with rows in the
  /// preceding micro-batch or step.
  bool prefetches_experts = false;
  BufferCounts buffers;
  /// Number of complete checkpoints that keep weights and states in place on NVMe. One more may be
  /// incomplete: see written_in_background().
  std::uint32_t kept_checkpoints = 0;
  friend bool operator==(const Options&, const Options&) = default;
};

}  // namespace ballast::step
