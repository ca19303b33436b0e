#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

#include "src/step/buffer_cache.h"
#include "src/step/movements.h"
#include "src/step/plan_types.h"
#include "src/step/value_slots.h"

namespace ballast::step {

/// Finds the buffers of a plan's values, and emits the operations that move values between device,
/// host and NVMe.
class Values {
 public:
  Values(const PlacedProblem& placed, const ValueSlots& slots, Movements& movements,
         std::uint32_t micro_batches);

  /// Copies the inputs of a micro-batch to the device.
  void upload_inputs(std::uint32_t micro);
  /// Copies the report of the passes to the host.
  void offload_report();

  /// Begins a training step with these `stops`: values that wait below the device for the backward
  /// pass leave it after the first pass that reads them.
  void store_along(const std::vector<const model::Stop*>& stops);
  /// Begins the next stop.
  void begin(const model::Stop& stop) { backward_ = stop.backward; }

  /// Writes zeros to the NVMe homes of waiting values, so that later writes only overwrite.
  void fill_homes();

  /// Returns whether a pass uses the operand: an optional one only if its block keeps the value.
  [[nodiscard]] bool binds(const model::Operand& operand) const;
  /// Returns the buffer of a value's operand. Brings back values that have left the device.
  BufferId bind(const model::Operand& operand, std::uint32_t micro);
  /// Offloads values that the pass has written for the host, or that wait there for the backward
  /// pass. Passes of recipes write nothing new.
  void after(model::PassId pass, std::uint32_t micro);

 private:
  /// Returns the index of a micro-batch among those that pass a stop together.
  [[nodiscard]] std::uint32_t place_among(std::uint32_t micro) const {
    return placed_.options.order == Order::layer_major ? micro : 0;
  }
  [[nodiscard]] const model::ValueClass& class_of(model::ValueId value) const {
    return program_.classes[program_.values[value].of];
  }
  /// Returns the buffer of a value in a ring.
  [[nodiscard]] BufferId& in_ring(model::ValueId value, std::uint32_t micro) {
    return in_ring_[std::size_t{value} * micro_batches_ + micro];
  }
  BufferId begin_life(model::ValueId value, std::uint32_t micro);
  BufferId read(model::ValueId value, std::uint32_t micro);
  BufferId bring_back(model::ValueId value, std::uint32_t micro);
  void share_counts(model::ValueId value, model::BlockId block, std::uint32_t micro);
  void store(model::ValueId value, std::uint32_t micro);
  void move(Action action, model::ValueId value, model::BlockId block, std::uint32_t micro,
            BufferId from, BufferId to, Bytes bytes);

  const ProgramTable& table_;
  const model::StepProgram& program_;
  const Colours& colours_;
  const PlacedProblem& placed_;
  const ValueSlots& slots_;
  Movements& move_;
  std::uint32_t micro_batches_;
  bool backward_ = false;
  std::vector<RoundRobin> rings_;  ///< by class
  RoundRobin staging_;
  std::vector<BufferId> in_ring_;
  /// By value that leaves the device: the pass after which it does; kNone: it stays.
  std::vector<model::PassId> stored_after_;
  std::vector<bool> stores_;  ///< by pass
  struct Brought {
    model::ValueId value = model::kNone;
    BufferId buffer = kNoBuffer;
  };
  std::vector<Brought> brought_;  ///< by micro-batch: the last value
};

}  // namespace ballast::step
