#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/step/gradient_mover.h"
#include "src/step/move_context.h"
#include "src/step/weight_mover.h"

namespace ballast::step {

/// Brings states, weights and gradients together for updates, and returns them to their homes.
class UpdateMover : public Mover {
 public:
  UpdateMover(MoveContext& plan, WeightMover& weights, GradientMover& gradients);

  /// Returns the number of sub-groups on NVMe, the first ones updated in `pass`, whose states are
  /// fetched before the pass begins.
  [[nodiscard]] std::uint32_t states_ahead(UpdatedIn pass) const;
  /// Returns whether the staging buffer of number `ordinal` among them is free: all updates of the
  /// other pass that need it are in the plan.
  [[nodiscard]] bool has_room_ahead(UpdatedIn pass, std::uint32_t ordinal) const;
  void fetch_states_ahead(UpdatedIn pass, std::uint32_t ordinal);
  /// Returns whether the states of `block`, at least of its first sub-group, are among those.
  [[nodiscard]] bool has_states_ahead(std::uint32_t block) const {
    return has_states_ahead(block, 0);
  }
  /// Emits the update of `block`. `lag`: see Operation. Blocks are updated in update order. A
  /// speculating block is updated with lag 0 and, in a rollback, again with lag 1.
  void update(std::uint32_t block, std::uint32_t lag);
  /// Declares that the plan has no updates in the forward pass.
  void omit_updates_of_forward() { swapped_in(UpdatedIn::forward).updated = kAll; }

  // For HomeMover.

  /// Returns the host buffer through which states on NVMe pass.
  [[nodiscard]] BufferId state_slot(std::uint32_t block, std::uint32_t group) const;
  void fetch_states(std::uint32_t block, std::uint32_t group, std::uint32_t lag, Condition when);
  void writeback_weights(std::uint32_t block, BufferId staging, std::uint32_t lag,
                         Speculation speculation, Condition when);
  void writeback_states(std::uint32_t block, std::uint32_t group, BufferId staging,
                        std::uint32_t lag, Speculation speculation, Condition when);

 private:
  /// The sub-groups with states on NVMe that are updated in one pass.
  struct SwappedGroup {
    std::vector<SwappedStates> states;  ///< in update order
    std::size_t first_slot = 0;         ///< staging buffer of the first one, modulo their number
    std::size_t updated = 0;            ///< updates in the plan so far
  };
  static constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  [[nodiscard]] SwappedGroup& swapped_in(UpdatedIn pass) {
    return swapped_[static_cast<std::size_t>(pass)];
  }
  [[nodiscard]] const SwappedGroup& swapped_in(UpdatedIn pass) const {
    return swapped_[static_cast<std::size_t>(pass)];
  }
  [[nodiscard]] std::size_t slot_of(const SwappedGroup& group, std::size_t ordinal) const;
  [[nodiscard]] bool has_states_ahead(std::uint32_t block, std::uint32_t group) const;
  [[nodiscard]] Speculation speculation(std::uint32_t block, std::uint32_t lag) const;
  BufferId states_on_host(std::uint32_t block, std::uint32_t group, std::uint32_t lag);
  BufferId weights_for_update(std::uint32_t block, std::uint32_t lag);
  void add_undo(Operation& update) const;
  void add_permission(Operation& update) const;
  void update_on_device(std::uint32_t block, std::uint32_t lag);
  void update_on_host(std::uint32_t block, std::uint32_t lag);
  void emit_update(Operation update);
  void return_weights(std::uint32_t block, BufferId updated, std::uint32_t lag);
  void writeback(Operation writing, Condition when);
  [[nodiscard]] std::uint32_t sub_groups(std::uint32_t block) const {
    return static_cast<std::uint32_t>(problem_.blocks[block].sub_groups.size());
  }

  WeightMover& weights_;
  GradientMover& gradients_;
  std::array<SwappedGroup, 2> swapped_;  ///< by pass
  /// By block: position of its first sub-group among those of its pass.
  std::vector<std::size_t> ordinal_;
};

}  // namespace ballast::step
