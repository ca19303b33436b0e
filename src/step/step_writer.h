#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/model/step_program.h"
#include "ballast/step/labels.h"
#include "ballast/step/program_index.h"

#include "src/step/gradient_mover.h"
#include "src/step/home_mover.h"
#include "src/step/layout.h"
#include "src/step/move_context.h"
#include "src/step/row_mover.h"
#include "src/step/update_mover.h"
#include "src/step/value_mover.h"
#include "src/step/weight_mover.h"

namespace ballast::step {

/// Spreads `count` events evenly over `steps` steps.
class EventSpread {
 public:
  EventSpread(std::uint32_t count, std::uint32_t steps) : count_(count), steps_(steps) {}
  /// Returns whether the next event is due in step `at` or earlier. In the last step all are.
  [[nodiscard]] bool due(std::uint32_t at) const {
    if (given_ == count_) return false;
    return at + 1 == steps_ || std::uint64_t{given_} * steps_ <= std::uint64_t{at} * count_;
  }
  [[nodiscard]] std::uint32_t next() const { return given_; }
  std::uint32_t take() { return given_++; }

 private:
  std::uint32_t count_;
  std::uint32_t steps_;
  std::uint32_t given_ = 0;
};

/// Writes one plan. step.cpp tells the story; the functions that it calls are in step_writer.cpp.
class StepWriter {
 public:
  StepWriter(const std::string& name, const PlacedProblem& placed, const Layout& layout,
             std::uint32_t micro_batches);

  Plan training_step(bool applies_updates);
  Plan evaluation();
  Plan flush();
  /// Empty if no block speculates.
  Plan rollback();
  Plan fill(Homes homes);
  Plan read(std::uint32_t first, std::uint32_t count, Homes homes);

 private:
  using BlockId = model::BlockId;
  using Stop = model::Stop;

  /// Micro-batches that pass a stop before the next stop.
  struct Group {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    bool last = true;  ///< whether it is the last of the step
    [[nodiscard]] bool first() const { return begin == 0; }
  };
  [[nodiscard]] std::vector<Group> groups() const;
  [[nodiscard]] bool is_layer_major() const { return placed_.options.order == Order::layer_major; }
  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(program_.blocks.size());
  }
  template <class Handle>
  void for_operands(const Stop& stop, const Handle& handle) const {
    for (const model::PassId pass : stop.passes) {
      for (const model::Operand& operand : program_.passes[pass].operands) handle(operand);
    }
  }

  void begin(const Group& group);
  void arrive(const Stop& stop, const Group& group);
  void prefetch(const Stop& stop);
  void recompute(const Stop& stop, const Group& group);
  void clear_all_sums();
  void clear_sums(const Stop& stop);
  void bring_sums(const Stop& stop, const Group& group);
  void offload_sums(const Stop& stop, const Group& group);
  void compute(const Stop& stop, const Group& group);
  void select_ahead(const Stop& stop, const Group& group);
  void finish(BlockId block);

  OpId compute(model::PassId id, std::uint32_t micro);
  BufferId bind(const model::Operand& operand, model::PassId pass, std::uint32_t micro);
  void clear(BlockId block);
  [[nodiscard]] ProgramIndex::Blocks ahead_of(const Stop& stop) const;
  [[nodiscard]] bool leaves_updates() const;
  [[nodiscard]] bool is_updated_in_forward(BlockId block) const {
    return placed_.is_updated_in(UpdatedIn::forward, block);
  }
  void fetch_states_ahead(UpdatedIn pass, EventSpread& ahead, std::uint32_t at);

  /// Returns the sum of a block's gradient that is cleared; kNone if there is none.
  [[nodiscard]] model::SumId cleared_sum(BlockId block) const {
    const std::vector<model::SumId>& sums = index_.sums_of(block);
    return sums.empty() || !program_.sums[sums.front()].clears ? model::kNone : sums.front();
  }

  const ProgramIndex& index_;
  const model::StepProgram& program_;
  const PlacedProblem& placed_;
  const Layout& layout_;
  std::uint32_t micro_batches_;
  MoveContext plan_;
  WeightMover weights_;
  RowMover rows_;
  GradientMover gradients_;
  UpdateMover updates_;
  HomeMover homes_;
  ValueMover values_;
  Recomputation recomputation_;
  bool applies_updates_ = false;
  BlockId arrived_ = 0;            ///< blocks that the current group has reached
  std::vector<bool> cleared_;      ///< by block
  std::vector<bool> brought_;      ///< by SumId: on the device for the current group
  EventSpread ahead_of_backward_;  ///< states for the backward pass of this step
  EventSpread ahead_of_forward_;   ///< states for the forward pass of the next step
  OpId first_head_ = kNoOp;
  OpId last_head_ = kNoOp;
  bool at_head_ = false;  ///< whether the current group has reached the head
};

}  // namespace ballast::step
