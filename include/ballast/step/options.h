#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ballast/core/places.h"

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

/// Numbers of buffers that are all open: a planner chooses, or the defaults of BufferCounts apply.
inline constexpr BufferCounts kOpenBuffers = {0, 0, 0, 0, 0, 0};

/// A member of BufferCounts.
struct BufferKind {
  std::string_view key;                        ///< path of its key in configs
  std::uint32_t BufferCounts::*count;          ///< 0 in a config means open
  std::uint32_t few;                           ///< number used if memory is short
  static constexpr std::uint32_t kFewest = 1;  ///< number used if not even these fit
  static constexpr std::uint32_t kMax = 1024;  ///< maximum of the key
};

/// Kinds in the order in which a planner adds buffers where there is room.
inline constexpr auto kBufferKinds = std::to_array<BufferKind>(
    {{"zero_optimization.offload_optimizer.buffer_count", &BufferCounts::state_staging, 1},
     {"ballast.device_weight_buffers", &BufferCounts::weight_slots, 2},
     {"zero_optimization.offload_param.buffer_count", &BufferCounts::weight_staging, 1},
     {"ballast.gradient_buffers", &BufferCounts::gradient_staging, 1},
     {"ballast.activation_buffers", &BufferCounts::activation_staging, 1},
     {"ballast.device_gradient_buffers", &BufferCounts::gradient_slots, 2}});

/// The part of a block's placement that the user has set. Empty members are open.
struct PlacementConstraint {
  std::optional<Tier> weights;
  std::optional<Tier> optimizer;
  std::optional<Tier> activations;  ///< tier of the block's input
  std::optional<Kept> kept;         ///< which of a layer's intermediates stay
  std::optional<Tier> gradients;    ///< host or nvme

  friend bool operator==(const PlacementConstraint&, const PlacementConstraint&) = default;
};

/// An explicit placement of some blocks.
struct PlacementRule : PlacementConstraint {
  std::uint64_t first_block = 0;
  std::uint64_t last_block = 0;  ///< inclusive

  friend bool operator==(const PlacementRule&, const PlacementRule&) = default;
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
