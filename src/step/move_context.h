#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "ballast/plan/plan.h"
#include "ballast/step/problem.h"

#include "src/plan/ordering.h"
#include "src/step/layout.h"
#include "src/step/placed_problem.h"

namespace ballast::step {

/// The plan that all movers write, and the conditions of its operations.
class MoveContext {
 public:
  MoveContext(std::string name, const PlacedProblem& placed, const Layout& layout,
              std::uint32_t micro_batches);

  const PlacedProblem& placed;
  const Layout& layout;

  /// Adds `operation` (without lane, device and edges) and returns its id. It runs on the device of
  /// its block.
  OpId emit(Operation operation) {
    const std::uint8_t device = placed.device_of(operation.block);
    return emit_on(device, std::move(operation));
  }
  /// Like emit(), for an operation on `device`.
  OpId emit_on(std::uint8_t device, Operation operation) {
    operation.device = is_per_device(lane_of(operation.action)) ? device : std::uint8_t{0};
    return emitter_.emit(std::move(operation));
  }
  /// Like emit(), if `condition` holds, unless `unless` holds, too.
  OpId emit_if(Condition condition, Operation operation, std::optional<Condition> unless = {});
  Plan finish() { return emitter_.finish(); }

  /// Begins passes of the micro-batches from `first` on, for which weights are needed.
  void begin_passes(std::uint32_t first) { passing_ = first; }
  // Conditions of operations on a block; always true except for experts. Joint operations of the
  // ranks depend on the rows of all ranks.
  /// The condition that current passes need the block's weights.
  [[nodiscard]] Condition for_pass(std::uint32_t block) const;
  /// The condition that the block has a gradient. `lag`: see Operation.
  [[nodiscard]] Condition for_gradient(std::uint32_t block, std::uint32_t lag = 0) const;
  /// The condition that the block is updated.
  [[nodiscard]] Condition for_update(std::uint32_t block, std::uint32_t lag) const;

 private:
  /// Rows that the block computes; null if they do not depend on a router.
  [[nodiscard]] const model::RowCount* rows_of(std::uint32_t block) const {
    const auto& rows = placed.problem.program().blocks[block].rows;
    return rows ? &*rows : nullptr;
  }
  [[nodiscard]] double likelihood(const Condition& condition, std::uint32_t block) const;

  plan::Emitter emitter_;
  std::uint32_t passing_ = 0;  ///< the first of the micro-batches that pass together
};

/// A mover emits the operations that move one kind of data. Movers of one plan share a context,
/// which outlives them.
class Mover {
 protected:
  explicit Mover(MoveContext& plan)
      : plan_(plan),
        placed_(plan.placed),
        problem_(placed_.problem),
        program_(problem_.program()),
        layout_(plan.layout),
        rank_(placed_.sizes) {}

  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return placed_.at(block); }
  /// Returns whether the trained weights of `block` have a separate home.
  [[nodiscard]] bool has_separate_trained_home(std::uint32_t block) const {
    return layout_.trained_home[block] != kNoBuffer;
  }
  /// Returns whether they have one on this tier.
  [[nodiscard]] bool has_separate_trained_home(std::uint32_t block, Tier tier) const;
  [[nodiscard]] const DevicePlaces& places_of(std::uint32_t block) const {
    return layout_.devices[placed_.device_of(block)];
  }

  MoveContext& plan_;
  const PlacedProblem& placed_;
  const Problem& problem_;
  const model::StepProgram& program_;
  const Layout& layout_;
  const RankSizes& rank_;
};

}  // namespace ballast::step
