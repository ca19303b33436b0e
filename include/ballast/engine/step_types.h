#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/kernels.h"

namespace ballast::engine {

/// Token ids of micro-batches: [micro-batches, sequences, length] each. With sequence parallelism,
/// `length` consecutive tokens of each sequence.
struct TokenBatch {
  std::span<const std::int32_t> tokens;   ///< in [0, vocab)
  std::span<const std::int32_t> targets;  ///< below vocab; negative: ignored
  /// Position of each token in its document: 0, or one more than the preceding token's. Attention
  /// stays inside a document. Given if and only if Blueprint::has_positions(); otherwise every
  /// sequence is one document.
  std::span<const std::int32_t> positions = {};
  /// Positions of all tokens of the sequences [micro-batches, sequences, whole length]. Given if
  /// and only if the blueprint is packed and this rank has a part of the sequences.
  std::span<const std::int32_t> whole_positions = {};
};

/// Mean loss of an evaluation.
struct Evaluation {
  double loss = 0.0;  ///< mean cross-entropy per counted target in nats, or mean loss per pair
  std::uint64_t targets = 0;  ///< counted targets of all ranks, or pairs that have some
};

/// Results of one training step.
struct StepResult {
  /// Mean cross-entropy over the counted targets of the whole batch in nats; with Blueprint::pairs,
  /// mean loss over the pairs.
  double loss = 0.0;
  std::uint64_t targets = 0;  ///< counted targets of all ranks, or pairs that have some
  model::PairResult pairs;    ///< means over the pairs of the whole batch
  /// Router losses without their coefficients: those of the step, or means over the micro-batches
  /// of this rank if the losses are those of micro-batches or have no gradient. 0 without experts.
  double balance_loss = 0.0;
  double router_z_loss = 0.0;
  /// Rows dispatched to each expert, by layer and expert, over all ranks. Empty for layers without
  /// experts, and without any.
  std::vector<std::vector<std::uint64_t>> expert_rows;
  /// L2 norm over all gradients before clipping, without the loss scale; not finite if skipped.
  double grad_norm = 0.0;
  bool skipped = false;  ///< a gradient was not finite, so nothing was updated
  /// The step was clipped or skipped, so its speculative updates were undone and repeated.
  bool rolled_back = false;
  bool paused = false;  ///< speculating blocks waited for the gate, see SpeculationPace
};

/// Decides when speculative updates pause. A step that is clipped or skipped repeats them, which
/// costs more than they save in several other steps. So they pause after half of the last 8 steps
/// were such steps, and resume when at most one was. Results do not depend on it, and all ranks
/// decide alike because all have the same norm.
class SpeculationPace {
 public:
  /// Notes a training step. `as_assumed`: it was neither clipped nor skipped.
  void note(bool as_assumed) {
    recent_ = static_cast<std::uint8_t>(recent_ << 1U | (as_assumed ? 0U : 1U));
    const int repeated = std::popcount(recent_);
    paused_ = repeated >= (paused_ ? 2 : 4);
  }
  [[nodiscard]] bool paused() const { return paused_; }

 private:
  std::uint8_t recent_ = 0;  ///< one bit per step, the last one lowest
  bool paused_ = false;
};

/// Returns how many parts of `size` targets have a counted one.
[[nodiscard]] std::uint64_t count_losses(std::span<const std::int32_t> targets, std::size_t size);

/// Copies the micro-batches to their host `buffers`: tokens, targets, sum rows, positions. Throws
/// Error(data) for positions that violate TokenBatch.
void copy_batch(const Blueprint& blueprint, const TokenBatch& batch, std::uint32_t micro_batches,
                std::span<const HostBytes> buffers);

}  // namespace ballast::engine
