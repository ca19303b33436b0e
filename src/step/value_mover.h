#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"
#include "ballast/step/labels.h"

#include "src/step/buffers_in_turn.h"
#include "src/step/home_mover.h"
#include "src/step/layout.h"
#include "src/step/move_context.h"

namespace ballast::step {

/// Finds the buffers of a plan's values, and emits the operations that move values between device,
/// host and NVMe.
class ValueMover : public Mover {
 public:
  ValueMover(MoveContext& plan, HomeMover& homes, std::uint32_t micro_batches);

  /// Returns the host buffer with the tokens of a micro-batch.
  [[nodiscard]] BufferId batch_on_host(std::uint32_t micro) const;
  /// Copies the inputs of a micro-batch to the device.
  void upload_inputs(std::uint32_t micro);
  /// Copies the report of the passes to the host.
  void offload_report();

  /// Begins a plan in which values are copied between devices along `routes`.
  void route_along(const Routes& routes) { routes_ = &routes; }
  /// Begins a training step with these `stops`: values that wait below the device for the backward
  /// pass leave it after the first pass that reads them.
  void store_along(const std::vector<const model::Stop*>& stops);
  /// Begins the next stop.
  void begin(const model::Stop& stop) { backward_ = stop.backward; }

  /// Writes zeros to the NVMe homes of waiting values, so that later writes only overwrite.
  void fill_homes();

  /// Returns whether a pass uses the operand: an optional one only if its block keeps the value.
  [[nodiscard]] bool binds(const model::Operand& operand) const;
  /// Returns the buffer of a value's operand in `pass`. Brings back values that have left the
  /// device.
  BufferId bind(const model::Operand& operand, model::PassId pass, std::uint32_t micro);
  /// Copies values that the pass has written to other devices that read them. Offloads values that
  /// it has written for the host, or that wait there for the backward pass. Passes of recipes write
  /// nothing new.
  void after(model::PassId pass, std::uint32_t micro);

 private:
  /// Returns the index of a micro-batch among those that pass a stop together.
  [[nodiscard]] std::uint32_t place_among(std::uint32_t micro) const {
    return placed_.options.order == Order::layer_major ? micro : 0;
  }
  [[nodiscard]] const model::ValueClass& class_of(model::ValueId value) const {
    return program_.classes[program_.values[value].of];
  }
  /// A micro-batch of a value on a device.
  struct Instance {
    model::ValueId value = 0;
    std::uint32_t micro = 0;
    std::uint8_t device = 0;
  };
  /// Returns the buffer of a value in a ring.
  [[nodiscard]] BufferId& in_ring(const Instance& at) {
    const std::size_t value = at.device * program_.values.size() + at.value;
    return in_ring_[value * micro_batches_ + at.micro];
  }
  [[nodiscard]] std::uint8_t device_of(model::PassId pass) const {
    return placed_.device_of(program_.passes[pass].block);
  }
  [[nodiscard]] Instance at_owner(model::ValueId value, std::uint32_t micro) const {
    return {value, micro, placed_.device_of(program_.values[value].owner)};
  }
  BufferId begin_life(const Instance& at, bool leaves);
  BufferId read(const Instance& at);
  BufferId bring_back(const Instance& at);
  void share_counts(model::ValueId value, model::BlockId block, std::uint32_t micro);
  void copy_to_devices(model::PassId pass, std::uint32_t micro);
  void store(model::ValueId value, std::uint32_t micro);
  /// A copy of a value of one micro-batch.
  struct Move {
    BufferId from = kNoBuffer;
    BufferId to = kNoBuffer;
    Bytes bytes = 0;
    Bytes offset = 0;  ///< see Operation
    // Whether only this tensor place's part of a buffer is moved.
    bool from_part = false;
    bool to_part = false;
  };
  void gather_parts(const Instance& at, BufferId own, BufferId slot);
  void move(Action action, const Instance& at, model::BlockId block, const Move& move);

  HomeMover& homes_;
  const ProgramIndex& index_;
  const Colours& colours_;
  const ValueBuffers& slots_;
  std::uint32_t micro_batches_;
  const Routes* routes_;
  bool backward_ = false;
  /// Rings of a device, by class.
  struct Rings {
    std::vector<RoundRobin> shared;
    std::vector<RoundRobin> leaving;
  };
  std::vector<Rings> rings_;  ///< by device
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
