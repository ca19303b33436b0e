#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/step/buffers_in_turn.h"
#include "src/step/move_context.h"
#include "src/step/row_mover.h"

namespace ballast::step {

/// Moves gradient sums between micro-batches, and complete gradients to their updates.
class GradientMover : public Mover {
 public:
  GradientMover(MoveContext& plan, RowMover& rows);

  /// Returns the device buffer of a gradient sum.
  [[nodiscard]] BufferId on_device(model::SumId sum) const { return on_device_[sum]; }
  /// Takes the device buffer of a sum whose home is in host memory, for a micro-batch. Moves the
  /// sum there unless it is the first of the step.
  void bring_sum(model::SumId sum, std::uint32_t micro);
  /// Moves it to its home.
  void offload_sum(model::SumId sum, std::uint32_t micro);
  /// Packs the finished gradient of `block`, reduces it over the ranks and moves it to the memory
  /// where the update reads it; copies its statistics to the host.
  void deliver(std::uint32_t block);
  /// Returns the host buffer in which an update on the host finds the gradient: with lag 0 the one
  /// that deliver() has just filled.
  BufferId on_host(std::uint32_t block, std::uint32_t lag);
  /// Returns the next staging buffer for a gradient on NVMe.
  BufferId next_staging() { return staging_.next(); }
  /// Emits the gate; in training, with all statistics.
  OpId gate(bool training);

 private:
  void move_sum(Action action, model::SumId sum, std::uint32_t micro);
  /// Returns the device buffer with the packed gradient.
  BufferId pack_on_device(std::uint32_t block);
  void offload(std::uint32_t block, BufferId packed);
  /// Returns the host buffer for a packed gradient that an update on the host will read.
  BufferId next_delivered(std::uint32_t block);
  void writeback_delivered(std::uint32_t block);
  /// Sums `packed` over the ranks, in place unless its home on the device has only this rank's
  /// shard. Returns the buffer with the sum.
  BufferId reduce(std::uint32_t block, BufferId packed);
  /// Emits an operation on a gradient, under its condition.
  void emit_if_used(Operation operation);

  RowMover& rows_;
  std::vector<BufferId> on_device_;  ///< by SumId
  std::vector<RoundRobin> rings_;    ///< for sums whose homes are in host memory
  std::vector<RoundRobin> slots_;    ///< for packed gradients, by device
  RoundRobin staging_;
  RoundRobin scattered_;            ///< packed gradients of tables on their way to the device
  BufferId delivered_ = kNoBuffer;  ///< the last gradient in host memory
};

}  // namespace ballast::step
