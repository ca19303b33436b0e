#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/plan/plan.h"
#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

#include "src/plan/ordering.h"
#include "src/step/layout.h"
#include "src/step/placed_problem.h"

namespace ballast::step {

/// Hands out buffers in turn.
class RoundRobin {
 public:
  explicit RoundRobin(const std::vector<BufferId>& buffers) : buffers_(buffers) {}
  BufferId next() { return buffers_[position_++ % buffers_.size()]; }

 private:
  const std::vector<BufferId>& buffers_;
  std::size_t position_ = 0;
};

/// An LRU cache of buffers for blocks in transit: the least recently used buffer is taken for the
/// next block, and a block that is still in a buffer is not moved again.
class BufferCache {
 public:
  explicit BufferCache(const std::vector<BufferId>& buffers) {
    slots_.reserve(buffers.size());
    for (const BufferId id : buffers) slots_.push_back({id, kEmpty, {}});
  }

  struct Entry {
    BufferId buffer = kNoBuffer;
    bool fill = false;  ///< the data must be moved there first
    /// The data are already there if this condition holds.
    std::optional<Condition> unless = {};
  };

  /// Returns the buffer of `block`, which becomes the most recently used one. `when`: the condition
  /// under which the data are needed and will be there.
  Entry take(std::uint32_t block, Condition when = {}) {
    auto found = std::find_if(slots_.begin(), slots_.end(),
                              [&](const Slot& slot) { return slot.block == block; });
    const bool there = found != slots_.end();
    if (!there) found = slots_.begin();
    Slot slot = *found;
    Entry taken = {slot.buffer, !there || (!slot.when.always() && slot.when != when)};
    if (there && taken.fill) taken.unless = slot.when;
    slot.block = block;
    if (taken.fill) slot.when = when;
    slots_.erase(found);
    slots_.push_back(slot);
    return taken;
  }

  /// Marks the buffer of `block` as incomplete.
  void forget(std::uint32_t block) {
    for (Slot& slot : slots_) {
      if (slot.block == block) slot.block = kEmpty;
    }
  }

 private:
  static constexpr std::uint32_t kEmpty = ~0U;
  struct Slot {
    BufferId buffer;
    std::uint32_t block;
    Condition when;
  };
  std::vector<Slot> slots_;  ///< least recently used first
};

/// Emits the operations that move weights, states and gradients between their homes and the places
/// where passes and updates need them.
class Movements {
 public:
  Movements(std::string name, const PlacedProblem& placed, const Layout& layout,
            std::uint32_t micro_batches);

  /// Adds `operation` (without lane, device and edges) and returns its id. It runs on the device of
  /// its block.
  OpId emit(Operation operation) {
    const std::uint8_t device = placed_.device_of(operation.block);
    return emit_on(device, std::move(operation));
  }
  /// Like emit(), for an operation on `device`.
  OpId emit_on(std::uint8_t device, Operation operation) {
    operation.device = is_per_device(lane_of(operation.action)) ? device : std::uint8_t{0};
    return emitter_.emit(std::move(operation));
  }
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
  /// Adds a condition to an operation.
  void add_condition(Operation& operation, Condition condition,
                     std::optional<Condition> unless = {}) const;

  /// Returns the device buffer with the whole weights of `block`, dequantised if necessary; moves
  /// them there if necessary.
  BufferId weights_on_device(std::uint32_t block) {
    return weights_on_device(block, for_pass(block));
  }
  /// Selects the rows of a table for the tokens of a micro-batch and moves them to the device.
  /// Returns the buffer there. `tokens`: the batch on the host.
  BufferId rows_on_device(std::uint32_t table, std::uint32_t micro, BufferId tokens);
  /// Selects them before rows_on_device(), which must follow for all micro-batches of the table in
  /// the same order.
  void select_ahead(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
    ahead_.push_back(select_rows(table, micro, tokens));
    table_ahead_ = table;
  }
  /// Returns the device buffer for the gradient of rows that a pass will write.
  BufferId next_row_gradients(std::uint32_t table) { return caches_of(table).row_gradients.next(); }
  /// Moves the gradient of rows of a micro-batch, which `written` has, to the host, where they wait
  /// for deliver_gradient(). Micro-batches follow in ascending order.
  void keep_row_gradients(std::uint32_t table, std::uint32_t micro, BufferId written,
                          BufferId tokens);
  /// Notes a batch on the device whose tokens have rows in the gradient sum of `block`, for
  /// deliver_gradient(). Micro-batches follow in ascending order.
  void keep_tokens(std::uint32_t block, BufferId tokens) {
    kept_rows_[block].push_back({kNoBuffer, tokens});
  }
  /// Returns the blocks that compute rows of `routing` and have buffers for weights that move
  /// before `router` has chosen.
  [[nodiscard]] ProgramIndex::Blocks blocks_ahead(std::uint32_t router,
                                                  model::ValueId routing) const;
  /// Moves weights to the device if their block had rows in the preceding micro-batch or step.
  void prefetch(std::uint32_t block);

  /// Returns the device buffer of a gradient sum.
  [[nodiscard]] BufferId sum_on_device(model::SumId sum) const { return sums_[sum]; }
  /// Takes the device buffer of a sum whose home is in host memory, for a micro-batch. Moves the
  /// sum there unless it is the first of the step.
  void bring_sum(model::SumId sum, std::uint32_t micro);
  /// Moves it to its home.
  void offload_sum(model::SumId sum, std::uint32_t micro);
  /// Packs the finished gradient of `block`, reduces it over the ranks and moves it to the memory
  /// where the update reads it; copies its statistics to the host.
  void deliver_gradient(std::uint32_t block);
  /// Emits the gate; in training, with all statistics.
  OpId gate(bool training);

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

  /// Initializes the weights and, for training, the states of `block` on the host and moves them to
  /// their homes.
  void fill(std::uint32_t block, Homes homes);
  /// Writes zeros to the NVMe homes of gradients, so that later writes only overwrite.
  void fill_gradients();
  /// Fills a staging buffer with zeros.
  void fill_with_zeros(Payload payload, std::uint32_t block, BufferId staging, Bytes bytes);
  /// Copies the weights and states of `block` to the host and reads them there.
  void read(std::uint32_t block, Homes homes);

 private:
  struct Home;
  /// The buffers of a device that blocks use in turn.
  struct DeviceCaches {
    explicit DeviceCaches(const DevicePlaces& places)
        : slots(places.weight_slots),
          share_slots(places.share_slots),
          dequantized(places.dequantized),
          table_rows(places.table_rows),
          row_gradients(places.row_gradients),
          gradient_slots(places.gradient_slots) {}
    BufferCache slots;
    BufferCache share_slots;
    BufferCache dequantized;
    RoundRobin table_rows;
    RoundRobin row_gradients;
    RoundRobin gradient_slots;
  };
  [[nodiscard]] DeviceCaches& caches_of(std::uint32_t block) {
    return caches_[placed_.device_of(block)];
  }
  [[nodiscard]] const DevicePlaces& places_of(std::uint32_t block) const {
    return layout_.devices[placed_.device_of(block)];
  }
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return placed_.at(block); }

  // `when`: the condition under which weights are needed.
  BufferId weights_on_device(std::uint32_t block, Condition when);
  BufferId kept_on_device(std::uint32_t block, Condition when);
  BufferId weights_on_host(std::uint32_t block, Condition when);
  BufferId weights_in_staging(std::uint32_t block, Condition when);
  BufferId share_on_device(std::uint32_t block, Condition when);
  /// A copy of weights.
  struct Copy {
    Use from;
    Use to;
    Bytes bytes = 0;
    Condition when;
    std::optional<Condition> unless = {};
    Bytes offset = 0;  ///< see Operation
  };
  void copy_weights(Action action, std::uint32_t block, const Copy& copy);
  /// Brings all weights that a rank keeps to a place that lacks them.
  void bring_weights(const BufferCache::Entry& place, Action action, std::uint32_t block,
                     BufferId from, Condition when);
  void bring_frozen(const BufferCache::Entry& place, Action action, std::uint32_t block,
                    BufferId from, Condition when);
  /// Returns whether the trained weights of `block` have a separate home.
  [[nodiscard]] bool has_separate_trained_home(std::uint32_t block) const {
    return layout_.trained_home[block] != kNoBuffer;
  }
  [[nodiscard]] bool has_separate_trained_home(std::uint32_t block, Tier trained) const {
    return has_separate_trained_home(block) &&
           layout_.buffers[layout_.trained_home[block]].tier == trained;
  }
  void gather_weights(std::uint32_t block, BufferId from, BufferId to, Condition when,
                      std::optional<Condition> unless = {});

  BufferId select_rows(std::uint32_t table, std::uint32_t micro, BufferId tokens);
  void move_sum(Action action, model::SumId sum, std::uint32_t micro);
  BufferId pack_on_device(std::uint32_t block);
  void scatter(std::uint32_t block, BufferId packed);
  void offload_gradient(std::uint32_t block, BufferId packed);
  BufferId next_delivered(std::uint32_t block);
  void writeback_delivered(std::uint32_t block);
  BufferId reduce_gradient(std::uint32_t block, BufferId packed);
  /// Emits an operation on a gradient, under its condition.
  void emit_if_used(Operation operation);
  /// Returns the host buffer in which an update on the host finds the gradient: with lag 0 the one
  /// that deliver_gradient() has just filled.
  BufferId gradient_on_host(std::uint32_t block, std::uint32_t lag);

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
  [[nodiscard]] std::uint32_t sub_groups(std::uint32_t block) const {
    return static_cast<std::uint32_t>(problem_.blocks[block].sub_groups.size());
  }
  [[nodiscard]] bool has_states_ahead(std::uint32_t block, std::uint32_t group) const;
  [[nodiscard]] BufferId state_slot(std::uint32_t block, std::uint32_t group) const;
  [[nodiscard]] Speculation speculation(std::uint32_t block, std::uint32_t lag) const;
  BufferId states_on_host(std::uint32_t block, std::uint32_t group, std::uint32_t lag);
  BufferId weights_for_update(std::uint32_t block, std::uint32_t lag);
  void add_undo(Operation& update) const;
  void fetch_states(std::uint32_t block, std::uint32_t group, std::uint32_t lag, Condition when);
  void add_permission(Operation& update) const;
  void update_on_device(std::uint32_t block, std::uint32_t lag);
  void update_on_host(std::uint32_t block, std::uint32_t lag);
  void emit_update(Operation update);
  void return_weights(std::uint32_t block, BufferId updated, std::uint32_t lag);
  void writeback_weights(std::uint32_t block, BufferId staging, std::uint32_t lag,
                         Speculation speculation, Condition when);
  void writeback_states(std::uint32_t block, std::uint32_t group, BufferId staging,
                        std::uint32_t lag, Speculation speculation, Condition when);
  void writeback(Operation writing, Condition when);

  [[nodiscard]] std::vector<Home> weight_homes(std::uint32_t block) const;
  [[nodiscard]] Home state_home(std::uint32_t block, std::uint32_t group) const;
  template <class Move>
  void in_pieces(Bytes all, Move move) const;
  template <class Handle>
  void for_homes(std::uint32_t block, Homes homes, Handle handle) const;
  void emit_piece(Action action, std::uint32_t block, const Home& home, Bytes offset, Bytes bytes,
                  std::vector<Use> uses);
  BufferId staging_of(std::uint32_t block, const Home& home);
  void fill_home(std::uint32_t block, const Home& home);
  void read_home(std::uint32_t block, const Home& home);

  /// Rows that the block computes; null if they do not depend on a router.
  [[nodiscard]] const model::RowCount* rows_of(std::uint32_t block) const {
    const auto& rows = program_.blocks[block].rows;
    return rows ? &*rows : nullptr;
  }

  const PlacedProblem& placed_;
  const Problem& problem_;
  const model::StepProgram& program_;
  const Options& options_;
  const Layout& layout_;
  const RankSizes& rank_;
  plan::Emitter emitter_;
  std::vector<DeviceCaches> caches_;  ///< by device
  BufferCache weight_staging_;
  std::vector<BufferId> sums_;  ///< on the device, by SumId
  std::vector<RoundRobin> sum_rings_;
  RoundRobin gradient_staging_;
  RoundRobin table_rows_;
  std::deque<BufferId> ahead_;  ///< rows that are selected, for the micro-batches of a table
  std::uint32_t table_ahead_ = 0;
  RoundRobin row_gradients_;
  RoundRobin scattered_;
  /// A batch that selected rows of a table, with their gradient on the host, or that has rows in
  /// the gradient sum of the embedding.
  struct KeptRows {
    BufferId gradient = kNoBuffer;
    BufferId tokens = kNoBuffer;
  };
  std::vector<std::vector<KeptRows>> kept_rows_;  ///< by block, until it is delivered
  std::uint32_t passing_ = 0;            ///< the first of the micro-batches that pass together
  BufferId delivered_ = kNoBuffer;       ///< the last gradient in host memory
  std::array<SwappedGroup, 2> swapped_;  ///< by pass
  /// By block: position of its first sub-group among those of its pass.
  std::vector<std::size_t> ordinal_;
};

}  // namespace ballast::step
