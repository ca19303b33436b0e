#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "src/step/buffers_in_turn.h"
#include "src/step/move_context.h"
#include "src/step/weight_mover.h"

namespace ballast::step {

/// Moves rows of tables, which the tokens of a micro-batch select, and their gradients.
class RowMover : public Mover {
 public:
  RowMover(MoveContext& plan, WeightMover& weights);

  /// Selects the rows of a table for the tokens of a micro-batch and moves them to the device.
  /// Returns the buffer there. `tokens`: the batch on the host.
  BufferId on_device(std::uint32_t table, std::uint32_t micro, BufferId tokens);
  /// Selects them before on_device(), which must follow for all micro-batches of the table in the
  /// same order.
  void select_ahead(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
    ahead_.push_back(select(table, micro, tokens));
    table_ahead_ = table;
  }
  /// Returns the device buffer for the gradient of rows that a pass will write.
  BufferId next_gradients(std::uint32_t table) {
    return device_gradients_[placed_.device_of(table)].next();
  }
  /// Moves the gradient of rows of a micro-batch, which `written` has, to the host, where they wait
  /// for scatter(). Micro-batches follow in ascending order.
  void keep_gradients(std::uint32_t table, std::uint32_t micro, BufferId written, BufferId tokens);
  /// Notes a batch on the device whose tokens have rows in the gradient sum of `block`, for
  /// add_tokens(). Micro-batches follow in ascending order.
  void keep_tokens(std::uint32_t block, BufferId tokens) {
    kept_[block].push_back({kNoBuffer, tokens});
  }
  /// Adds the batches that have been noted.
  void add_tokens(std::uint32_t block, std::vector<Use>& uses);
  /// Packs the gradient of a table in the host buffer `packed`, with its statistics unless it is
  /// then summed over the ranks.
  void scatter(std::uint32_t table, BufferId packed);

 private:
  /// Returns the host buffer with the rows.
  BufferId select(std::uint32_t table, std::uint32_t micro, BufferId tokens);

  WeightMover& weights_;
  std::vector<RoundRobin> device_rows_;       ///< by device
  std::vector<RoundRobin> device_gradients_;  ///< by device
  RoundRobin selected_;
  RoundRobin gradients_;
  std::deque<BufferId> ahead_;  ///< rows that are selected, for the micro-batches of a table
  std::uint32_t table_ahead_ = 0;
  /// A batch that selected rows of a table, with their gradient on the host, or that has rows in
  /// the gradient sum of the embedding.
  struct Kept {
    BufferId gradient = kNoBuffer;
    BufferId tokens = kNoBuffer;
  };
  std::vector<std::vector<Kept>> kept_;  ///< by block, until it is delivered
};

}  // namespace ballast::step
