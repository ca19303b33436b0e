#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/step/labels.h"

#include "src/step/layout.h"

namespace ballast::step {

using model::BufferRule;
using model::ClassId;
using model::HeadForm;
using model::kNone;
using model::MemoryKind;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::StepValue;
using model::ValueClass;
using model::ValueId;
using model::Waits;

namespace {

Kind kind_of(MemoryKind memory) {
  switch (memory) {
    case MemoryKind::intermediates:
      return Kind::intermediates;
    case MemoryKind::batch:
      return Kind::batch;
    case MemoryKind::activations:
      break;
  }
  return Kind::activations;
}

/// Adds the buffers of one program for one placement.
class SlotMaker {
 public:
  SlotMaker(const PlacedProblem& placed, BufferList& list)
      : index_(*placed.problem.index),
        program_(index_.program()),
        placed_(placed),
        colours_(index_.colours(placed.form, placed.trains())),
        list_(list),
        micro_batches_per_stop_(placed.micro_batches_per_stop()) {}

  ValueBuffers make() {
    slots_.devices.resize(placed_.devices());
    for (DeviceValues& device : slots_.devices) {
      device.shared.resize(program_.classes.size());
      device.leaving.resize(program_.classes.size());
      device.of_ranks.resize(program_.classes.size());
    }
    slots_.on_host.resize(program_.classes.size());
    if (!list_.merges()) slots_.own.resize(program_.values.size());
    if (placed_.trains()) {
      waiting_values();
      sums();
    }
    for (ClassId id = 0; id < program_.classes.size(); ++id) {
      for (std::uint8_t d = 0; d < placed_.devices(); ++d) shared_by(id, d);
      if (program_.classes[id].from_host) inputs(id);
    }
    counts();
    report();
    return std::move(slots_);
  }

 private:
  using Buffers = ValueBuffers::Buffers;

  /// Adds placed values, and kept values of blocks that keep them.
  void waiting_values() {
    std::size_t to_nvme = 0;
    Bytes largest = 0;
    const auto place = [&](ValueId id, bool& leaves) {
      const StepValue& value = program_.values[id];
      const Tier tier = placed_.at(value.owner).activations;
      const Bytes swapped = swapped_bytes(placed_.problem, value);
      largest = std::max(largest, swapped);
      leaves = leaves || placed_.leaves(value);
      to_nvme += tier == Tier::nvme ? micro_batches_per_stop_ : 0;
      wait_in(id, tier, tier == Tier::nvme ? swapped : waiting_bytes(placed_.problem, value));
    };
    for (const ValueId id : index_.values().placed) place(id, any_leaves_);
    for (const ValueId id : index_.values().kept_attention) {
      if (placed_.keeps(program_.values[id])) place(id, attention_leaves_);
    }
    for (const ValueId id : index_.values().kept) {
      const StepValue& value = program_.values[id];
      if (placed_.keeps(value)) wait_in(id, Tier::device, program_.bytes_of(value));
    }
    slots_.staging =
        list_.add_slots("activation staging", Tier::host, Kind::staging, largest,
                        std::min<std::size_t>(placed_.options.buffers.activation_staging, to_nvme));
  }

  void wait_in(ValueId id, Tier tier, Bytes bytes) {
    const StepValue& value = program_.values[id];
    const Kind kind = kind_of(program_.classes[value.of].memory);
    const std::uint8_t device = placed_.device_of(value.owner);
    if (bytes == 0) return;
    if (list_.merges()) {
      list_.merge(tier, kind, bytes, micro_batches_per_stop_, device);
      return;
    }
    slots_.own[id] = list_.add_equal([&](std::size_t m) { return name_of(value, m); }, tier, kind,
                                     bytes, micro_batches_per_stop_, device);
  }

  /// Returns "input of layer 0, 1".
  static std::string name_of(const StepValue& value, std::size_t micro) {
    const bool intermediates = value.waits == Waits::kept_attention ||
                               (value.waits == Waits::kept && value.recipe == kNone);
    return fmt::format("{}{} {}", value.name, intermediates ? "" : ",", micro);
  }

  void shared_by(ClassId id, std::uint8_t device) {
    const ValueClass& of = program_.classes[id];
    Buffers& shared = slots_.devices[device].shared[id];
    const Bytes bytes = bytes_in_ring(id);
    const auto add = [&](const std::string& name, std::size_t count) {
      return list_.add_slots(name, Tier::device, kind_of(of.memory), bytes, count, device);
    };
    switch (of.buffers) {
      case BufferRule::own:
        shared = own_slots(id, device);
        break;
      case BufferRule::in_turn:
        shared = add(placed_.trains() || index_.traits(id).of_reference ? of.name : of.word + "s",
                     ring_size(id, device));
        slots_.devices[device].leaving[id] =
            add(of.name + " to another device", leaving_size(id, device));
        break;
      case BufferRule::scratch:
        if (is_used(id) && is_used_on(device, id)) shared = add(of.name, 1);
        break;
      case BufferRule::step:
        if (!is_used_on(device, id)) break;
        shared = add(of.from_host ? of.name + " on the device" : of.name, placed_.micro_batches());
        break;
      case BufferRule::report:
        break;
    }
  }

  /// Returns the size of a buffer for values of a class, with room for the parts of all tensor
  /// places.
  [[nodiscard]] Bytes bytes_in_ring(ClassId id) const {
    Bytes bytes = program_.classes[id].bytes;
    // The planner lists the buffers of each candidate, so values are searched only if need be.
    if (!placed_.problem.partitions_activations) return bytes;
    for (const StepValue& value : program_.values) {
      if (value.of != id || !is_partitioned(placed_.problem, value)) continue;
      bytes = std::max(bytes, placed_.problem.tensor * waiting_bytes(placed_.problem, value));
    }
    return bytes;
  }

  /// Adds the inputs of the step on the host.
  void inputs(ClassId id) {
    const ValueClass& of = program_.classes[id];
    slots_.on_host[id] =
        list_.add_slots(of.name, Tier::host, kind_of(of.memory), of.bytes, placed_.micro_batches());
  }

  [[nodiscard]] bool is_used(ClassId id) const {
    return colours_.training[id] > 0 || colours_.evaluation[id] > 0;
  }
  /// Returns whether passes on `device` use a value of the class.
  [[nodiscard]] bool is_used_on(std::uint8_t device, ClassId id) const {
    if (placed_.devices() == 1) return true;
    for (ValueId v = 0; v < program_.values.size(); ++v) {
      if (program_.values[v].of == id && placed_.uses(v, device)) return true;
    }
    return false;
  }

  /// Returns a buffer per colour and per micro-batch that passes a stop together with others.
  Buffers own_slots(ClassId id, std::uint8_t device) {
    const ValueClass& of = program_.classes[id];
    if (!placed_.trains() && of.in_evaluation != kNone) return {};
    const StepValue* first = first_that_shares(id, device);
    if (first == nullptr) return {};
    const std::size_t evaluated = placed_.micro_batches_per_stop(
        std::min(placed_.problem.evaluation_micro_batches, placed_.micro_batches()));
    const std::size_t colours = colours_of(id, device, false);
    const std::size_t count =
        std::max(colours_of(id, device, true) * micro_batches_per_stop_,
                 colours > 0 ? (colours - 1) * micro_batches_per_stop_ + evaluated : 0);
    if (index_.traits(id).recomputed > 0 || of.in_evaluation != kNone) {
      // Named after the first value that uses them.
      if (of.bytes == 0) return {};
      return list_.add_equal([&](std::size_t i) { return name_of(*first, i); }, Tier::device,
                             kind_of(of.memory), of.bytes, count, device);
    }
    const std::string name = of.counts ? of.name + " on the device" : of.name;
    if (of.counts && placed_.problem.sharers > 1) {
      slots_.devices[device].of_ranks[id] =
          list_.add_slots(of.name + " of all ranks", Tier::device, kind_of(of.memory),
                          placed_.problem.sharers * of.bytes, count, device);
    }
    return list_.add_slots(name, Tier::device, kind_of(of.memory), of.bytes, count, device);
  }

  /// Returns the number of colours that the values of a class have on a device.
  [[nodiscard]] std::size_t colours_of(ClassId id, std::uint8_t device, bool training) const {
    const std::size_t all = training ? colours_.training[id] : colours_.evaluation[id];
    if (placed_.devices() == 1) return all;
    const Routes& routes = training ? placed_.training_routes : placed_.evaluation_routes;
    std::size_t most = 0;
    for (ValueId v = 0; v < program_.values.size(); ++v) {
      const bool counts = program_.values[v].of == id && colours_.of_value[v] != kNone;
      if (counts && routes.uses(v, device)) {
        most = std::max<std::size_t>(most, colours_.of_value[v] + 1);
      }
    }
    return std::min(all, most);
  }

  /// Returns the first value of a class that shares its buffers on a device; null if there is none.
  [[nodiscard]] const StepValue* first_that_shares(ClassId id, std::uint8_t device) const {
    ValueId first = kNone;
    for (const ValueId other : index_.traits(id).others) {
      if (!placed_.uses(other, device)) continue;
      first = other;
      break;
    }
    if (index_.traits(id).recomputed > 0) {
      for (const ValueId kept : index_.values().kept) {
        const StepValue& value = program_.values[kept];
        if (value.of != id || value.recipe == kNone || placed_.keeps(value)) continue;
        if (placed_.device_of(value.owner) != device) continue;
        first = std::min(first, kept);
        break;
      }
    }
    return first == kNone ? nullptr : &program_.values[first];
  }

  /// Training: one buffer is written while those of `micro_batches_per_stop_` micro-batches are
  /// read, and one more is on its way to or from the host. If only the input of the head passes,
  /// one buffer is enough. Evaluation and reference model: a stop writes one buffer while it reads
  /// those of all micro-batches.
  [[nodiscard]] std::size_t ring_size(ClassId id, std::uint8_t device) const {
    if (placed_.devices() == 1) return ring_size(id);
    const std::size_t values = values_in_ring(id, device);
    if (placed_.trains()) return values > 0 ? ring_size(id) : 0;
    return std::min(ring_size(id), values * micro_batches_per_stop_);
  }
  [[nodiscard]] std::size_t ring_size(ClassId id) const {
    const ProgramIndex::Traits& traits = index_.traits(id);
    if (traits.of_attention) return attention_leaves_ ? micro_batches_per_stop_ + 2 : 0;
    if (traits.of_reference) return micro_batches_per_stop_ + 1;
    if (!placed_.trains()) return micro_batches_per_stop_ + (traits.passing > 1 ? 1 : 0);
    return micro_batches_per_stop_ + (any_leaves_ || traits.others.size() > 1 ? 2 : 0);
  }

  /// Two: one is written while the other is copied.
  [[nodiscard]] std::size_t leaving_size(ClassId id, std::uint8_t device) const {
    std::size_t values = 0;
    for (ValueId v = 0; placed_.devices() > 1 && v < program_.values.size(); ++v) {
      const bool leaves = placed_.training_routes.leaves_from(v, device) ||
                          placed_.evaluation_routes.leaves_from(v, device);
      values += leaves && is_in_ring(v, id) ? 1 : 0;
    }
    return std::min<std::size_t>(2, values * micro_batches_per_stop_);
  }

  /// Returns whether the value may be in the ring of class `id`.
  [[nodiscard]] bool is_in_ring(ValueId v, ClassId id) const {
    const StepValue& value = program_.values[v];
    return value.of == id || (!placed_.trains() && program_.classes[value.of].in_evaluation == id);
  }
  /// Returns the number of values of a ring that passes on a device find there. Others have their
  /// own buffers.
  [[nodiscard]] std::size_t values_in_ring(ClassId id, std::uint8_t device) const {
    std::size_t count = 0;
    for (ValueId v = 0; v < program_.values.size(); ++v) {
      const StepValue& value = program_.values[v];
      const bool there = placed_.training_routes.stays_on(v, device) ||
                         placed_.evaluation_routes.stays_on(v, device);
      const bool at_home =
          placed_.waits_on_device(value) && placed_.device_of(value.owner) == device;
      const bool dropped = value.waits == Waits::kept_attention && !placed_.keeps(value);
      count += is_in_ring(v, id) && there && !at_home && !dropped ? 1 : 0;
    }
    return count;
  }

  /// Adds the host's copies of routings, for all micro-batches and ranks.
  void counts() {
    if (!list_.merges()) slots_.counts.assign(program_.values.size(), kNoBuffer);
    for (const ValueId id : index_.values().counts) {
      const StepValue& value = program_.values[id];
      const Bytes bytes =
          placed_.micro_batches() * (placed_.problem.sharers * program_.bytes_of(value));
      const Kind kind = kind_of(program_.classes[value.of].memory);
      if (list_.merges()) {
        list_.merge(Tier::host, kind, bytes, 1);
      } else {
        slots_.counts[id] = list_.add(value.name, Tier::host, kind, bytes);
      }
    }
  }

  /// Adds one buffer per device for the reports of all micro-batches.
  void report() {
    Bytes bytes = 0;
    const ValueClass* first = nullptr;
    for (const ValueClass& of : program_.classes) {
      if (of.buffers != BufferRule::report) continue;
      if (first == nullptr) first = &of;
      bytes += placed_.problem.micro_batches * of.bytes;
    }
    if (first == nullptr) return;
    const Kind kind = kind_of(first->memory);
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) {
      if (d != placed_.device_of(program_.head) && !reports(d)) continue;
      slots_.devices[d].report =
          list_.add(first->name + " on the device", Tier::device, kind, bytes, d);
    }
    slots_.report_on_host = list_.add(first->name, Tier::host, kind, bytes);
  }

  /// Returns whether passes on `device` write a part of the report.
  [[nodiscard]] bool reports(std::uint8_t device) const {
    for (ValueId v = 0; v < program_.values.size(); ++v) {
      const bool reported = program_.classes[program_.values[v].of].buffers == BufferRule::report;
      if (reported && placed_.uses(v, device)) return true;
    }
    return false;
  }

  /// Sums of one colour share a buffer if all micro-batches pass a stop together, and a ring of
  /// buffers if sums are on the host between micro-batches. Otherwise all sums are in use at once.
  void sums() {
    slots_.sums.assign(program_.sums.size(), kNoBuffer);
    if (placed_.options.order == Order::micro_batch_major) {
      for (std::size_t s = 0; s < slots_.sums.size(); ++s) {
        const model::GradientSum& sum = program_.sums[s];
        slots_.sums[s] = list_.add(list_.merges() ? std::string() : name_of(sum), Tier::device,
                                   Kind::accumulators, sum.bytes);
      }
      return;
    }
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) sums_of(d);
    if (placed_.offloads_sums()) slots_.ring_of = colours_.of_sum;
    if (placed_.has_sums_on_host()) sums_on_host();
  }

  /// Adds the buffers that sums of the blocks of a device share.
  void sums_of(std::uint8_t device) {
    const auto is_there = [&](std::size_t s) {
      return colours_.of_sum[s] != kNone && placed_.device_of(program_.sums[s].block) == device;
    };
    std::vector<Bytes> bytes(colours_.sums, 0);
    std::vector<std::size_t> users(colours_.sums, 0);
    for (std::size_t s = 0; s < program_.sums.size(); ++s) {
      if (!is_there(s)) continue;
      // The first one is large enough for every sum of a block.
      if (program_.sums[s].clears) bytes[0] = std::max(bytes[0], program_.sums[s].bytes);
      Bytes& own = bytes[colours_.of_sum[s]];
      own = std::max(own, program_.sums[s].bytes);
      ++users[colours_.of_sum[s]];
    }
    std::vector<Buffers> buffers(bytes.size());
    for (std::size_t c = 0; c < bytes.size(); ++c) {
      if (users[c] == 0 && placed_.devices() > 1) continue;
      const std::string name = list_.merges() ? std::string()
                               : c == 0       ? "gradient accumulator"
                                              : fmt::format("gradient accumulator {}", c);
      if (placed_.offloads_sums()) {
        const std::size_t most = placed_.options.buffers.gradient_slots;
        buffers[c] = list_.add_slots(name + " slot", Tier::device, Kind::accumulators, bytes[c],
                                     std::min(most, users[c]), device);
      } else {
        buffers[c] = {list_.add(name, Tier::device, Kind::accumulators, bytes[c], device)};
      }
    }
    if (placed_.offloads_sums()) {
      slots_.sum_rings = std::move(buffers);
      return;
    }
    for (std::size_t s = 0; s < program_.sums.size(); ++s) {
      if (is_there(s)) slots_.sums[s] = buffers[colours_.of_sum[s]].front();
    }
  }

  /// Adds the homes of sums between micro-batches.
  void sums_on_host() {
    slots_.sums_on_host.assign(program_.sums.size(), kNoBuffer);
    for (model::SumId s = 0; s < program_.sums.size(); ++s) {
      if (colours_.of_sum[s] == kNone) continue;
      const model::GradientSum& sum = program_.sums[s];
      const bool has_gradient =
          placed_.keeps_gradient_in_sum(sum.block) && index_.sums_of(sum.block).front() == s;
      const Bytes bytes =
          std::max(sum.bytes, has_gradient ? placed_.sizes.updated_gradient(sum.block) : 0);
      slots_.sums_on_host[s] =
          list_.add(list_.merges() ? std::string() : name_of(sum), Tier::host,
                    has_gradient ? Kind::gradients : Kind::accumulators, bytes);
    }
  }

  [[nodiscard]] std::string name_of(const model::GradientSum& sum) const {
    return fmt::format("{} {}", program_.blocks[sum.block].name,
                       sum.clears ? "accumulator" : "second accumulator");
  }

  const ProgramIndex& index_;
  const model::StepProgram& program_;
  const PlacedProblem& placed_;
  const Colours& colours_;
  BufferList& list_;
  std::uint32_t micro_batches_per_stop_;
  bool any_leaves_ = false;        ///< whether an activation leaves the device
  bool attention_leaves_ = false;  ///< whether kept results of attention do
  ValueBuffers slots_;
};

}  // namespace

ValueBuffers add_values(const PlacedProblem& placed, BufferList& list) {
  return SlotMaker(placed, list).make();
}

}  // namespace ballast::step
