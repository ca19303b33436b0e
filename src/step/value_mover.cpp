#include "src/step/value_mover.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ballast/step/labels.h"
#include "ballast/step/program_index.h"

namespace ballast::step {

using model::BlockId;
using model::BufferRule;
using model::kNone;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::StepValue;
using model::ValueId;
using model::Waits;

ValueMover::ValueMover(MoveContext& plan, HomeMover& homes, std::uint32_t micro_batches)
    : Mover(plan),
      homes_(homes),
      index_(*problem_.index),
      colours_(index_.colours(placed_.form, placed_.trains())),
      slots_(layout_.values),
      micro_batches_(micro_batches),
      routes_(&placed_.training_routes),
      staging_(slots_.staging),
      in_ring_(slots_.devices.size() * program_.values.size() * micro_batches, kNoBuffer),
      stored_after_(program_.values.size(), kNone),
      stores_(program_.passes.size(), false),
      brought_(micro_batches) {
  rings_.resize(slots_.devices.size());
  for (std::size_t d = 0; d < slots_.devices.size(); ++d) {
    const DeviceValues& device = slots_.devices[d];
    for (const auto& shared : device.shared) rings_[d].shared.emplace_back(shared);
    for (const auto& leaving : device.leaving) rings_[d].leaving.emplace_back(leaving);
  }
}

void ValueMover::store_along(const std::vector<const model::Stop*>& stops) {
  for (const model::Stop* stop : stops) {
    for (const model::PassId id : stop->passes) {
      const model::Pass& pass = program_.passes[id];
      for (const Operand& operand : pass.operands) {
        if (operand.kind != OperandKind::value) continue;
        const StepValue& value = program_.values[operand.number];
        // No forward pass reads what attention keeps.
        const auto last_access =
            value.waits == Waits::kept_attention ? OperandAccess::writes : OperandAccess::reads;
        if (operand.access != last_access) continue;
        if (pass.reference > 0 || !placed_.leaves(value)) continue;
        model::PassId& first = stored_after_[operand.number];
        if (first != kNone) continue;
        first = id;
        stores_[id] = true;
      }
    }
  }
}

namespace {

step::MovedValue kind_of(const model::ValueClass& of) {
  if (of.from_host) return step::MovedValue::batch;
  if (of.counts) return step::MovedValue::routing;
  return of.buffers == BufferRule::report ? step::MovedValue::losses : step::MovedValue::activation;
}

}  // namespace

void ValueMover::move(Action action, const Instance& at, BlockId block, const Move& move) {
  plan_.emit_on(
      at.device,
      {.action = action,
       .payload = Payload::value,
       .block = block,
       .micro = at.micro,
       .label = step::label_of(kind_of(class_of(at.value))),
       .bytes = move.bytes,
       .offset = move.offset,
       .traffic = action == Action::keep ? 2 * move.bytes : 0,
       .uses = {{.role = Role::source, .buffer = move.from, .part = move.from_part},
                {.role = Role::target, .buffer = move.to, .writes = true, .part = move.to_part}}});
}

BufferId ValueMover::batch_on_host(std::uint32_t micro) const {
  for (model::ClassId of = 0; of < program_.classes.size(); ++of) {
    if (program_.classes[of].from_host) return slots_.on_host[of][micro];
  }
  return kNoBuffer;
}

void ValueMover::upload_inputs(std::uint32_t micro) {
  for (ValueId v = 0; v < program_.values.size(); ++v) {
    const StepValue& value = program_.values[v];
    if (!program_.classes[value.of].from_host) continue;
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) {
      if (!routes_->uses(v, d)) continue;
      move(Action::upload, {v, micro, d}, value.owner,
           {.from = slots_.on_host[value.of][micro],
            .to = slots_.devices[d].shared[value.of][micro],
            .bytes = program_.bytes_of(value)});
    }
  }
}

/// Parts of the report that passes on other devices have written are copied to the device of the
/// head first.
void ValueMover::offload_report() {
  const std::uint8_t home = placed_.device_of(program_.head);
  Bytes bytes = 0;
  ValueId first = kNone;
  for (model::ClassId id = 0; id < program_.classes.size(); ++id) {
    const model::ValueClass& of = program_.classes[id];
    if (of.buffers != BufferRule::report) continue;
    const Bytes part = placed_.problem.micro_batches * of.bytes;
    for (ValueId v = 0; v < program_.values.size(); ++v) {
      if (program_.values[v].of != id) continue;
      if (first == kNone) first = v;
      for (std::uint8_t d = 0; placed_.devices() > 1 && d < placed_.devices(); ++d) {
        if (d == home || !routes_->uses(v, d)) continue;
        move(Action::transfer, {v, 0, d}, program_.head,
             {.from = slots_.devices[d].report,
              .to = slots_.devices[home].report,
              .bytes = part,
              .offset = bytes});
      }
    }
    bytes += part;
  }
  move(Action::offload, {first, 0, home}, 0,
       {.from = slots_.devices[home].report, .to = slots_.report_on_host, .bytes = bytes});
}

void ValueMover::fill_homes() {
  if (slots_.staging.empty()) return;
  const BufferId staging = staging_.next();
  std::vector<ValueId> on_nvme;
  Bytes largest = 0;
  for (ValueId id = 0; id < program_.values.size(); ++id) {
    const StepValue& value = program_.values[id];
    if (!placed_.leaves(value) || placed_.at(value.owner).activations != Tier::nvme) continue;
    on_nvme.push_back(id);
    largest = std::max(largest, swapped_bytes(placed_.problem, value));
  }
  homes_.fill_with_zeros(Payload::value, program_.values[on_nvme.front()].owner, staging, largest);
  for (const ValueId id : on_nvme) {
    const StepValue& value = program_.values[id];
    for (std::uint32_t m = 0; m < slots_.own[id].size(); ++m) {
      move(Action::writeback, {id, m}, value.owner,
           {.from = staging,
            .to = slots_.own[id][m],
            .bytes = swapped_bytes(placed_.problem, value)});
    }
  }
}

bool ValueMover::binds(const Operand& operand) const {
  if (!operand.optional || operand.kind != OperandKind::value) return true;
  return placed_.keeps(program_.values[operand.number]);
}

BufferId ValueMover::bind(const Operand& operand, model::PassId pass, std::uint32_t micro) {
  const Instance at = {operand.number, micro, device_of(pass)};
  if (is_on_host(program_, operand)) return slots_.counts[at.value];
  const DeviceValues& device = slots_.devices[at.device];
  const model::ClassId of = program_.values[at.value].of;
  switch (program_.classes[of].buffers) {
    case BufferRule::report:
      return device.report;
    case BufferRule::scratch:
      return device.shared[of].front();
    case BufferRule::step:
      return device.shared[of][micro];
    case BufferRule::own:
    case BufferRule::in_turn:
      break;
  }
  if (operand.access != OperandAccess::writes) return read(at);
  return begin_life(at, routes_->leaves(pass, at.value));
}

/// A waiting value has its own buffer on the device of its owner. In a schedule for evaluation no
/// value waits. `leaves`: only other devices read it.
BufferId ValueMover::begin_life(const Instance& at, bool leaves) {
  const StepValue& value = program_.values[at.value];
  const bool home = placed_.devices() == 1 || placed_.device_of(value.owner) == at.device;
  if (placed_.waits_on_device(value) && home && !leaves) {
    in_ring(at) = kNoBuffer;
    return slots_.own[at.value][place_among(at.micro)];
  }
  const model::ClassId in_evaluation = program_.classes[value.of].in_evaluation;
  const bool passes = !placed_.trains() && in_evaluation != kNone;
  if (passes || class_of(at.value).buffers == BufferRule::in_turn) {
    Rings& rings = rings_[at.device];
    return in_ring(at) =
               (leaves ? rings.leaving : rings.shared)[passes ? in_evaluation : value.of].next();
  }
  const std::size_t colour = colours_.of_value[at.value];
  return slots_.devices[at.device]
      .shared[value.of][colour * placed_.micro_batches_per_stop() + place_among(at.micro)];
}

/// Returns the place where its life began, where it was copied to, or where it was brought back.
BufferId ValueMover::read(const Instance& at) {
  if (backward_ && placed_.leaves(program_.values[at.value])) return bring_back(at);
  const BufferId ring = in_ring(at);
  return ring != kNoBuffer ? ring : begin_life(at, false);
}

/// The value stays until another value of the micro-batch is brought back.
BufferId ValueMover::bring_back(const Instance& at) {
  Brought& last = brought_[at.micro];
  if (last.value == at.value) return last.buffer;
  const StepValue& value = program_.values[at.value];
  const BufferId home = slots_.own[at.value][place_among(at.micro)];
  const BufferId slot = rings_[at.device].shared[value.of].next();
  const bool part = is_partitioned(placed_.problem, value);
  const Tier tier = placed_.at(value.owner).activations;
  if (tier != Tier::device) {
    BufferId host = home;
    if (tier == Tier::nvme) {
      host = staging_.next();
      move(Action::fetch, at, value.owner,
           {.from = home, .to = host, .bytes = swapped_bytes(placed_.problem, value)});
    }
    move(Action::upload, at, value.owner,
         {.from = host,
          .to = slot,
          .bytes = waiting_bytes(placed_.problem, value),
          .to_part = part});
  }
  if (part) gather_parts(at, tier == Tier::device ? home : kNoBuffer, slot);
  last = {at.value, slot};
  return slot;
}

/// Completes a value from the parts of all tensor places. This place's part is in `own`, or in
/// `slot` if there is no such buffer.
void ValueMover::gather_parts(const Instance& at, BufferId own, BufferId slot) {
  const StepValue& value = program_.values[at.value];
  const Bytes others = placed_.problem.tensor - 1;
  Operation gather = {.action = Action::gather,
                      .payload = Payload::value,
                      .group = RankGroup::tensor,
                      .block = value.owner,
                      .micro = at.micro,
                      .label = step::label_of(kind_of(class_of(at.value))),
                      .bytes = others * waiting_bytes(placed_.problem, value),
                      .uses = {{.role = Role::target, .buffer = slot, .writes = true}}};
  if (own != kNoBuffer) gather.uses.push_back({.role = Role::source, .buffer = own});
  plan_.emit_on(at.device, std::move(gather));
}

void ValueMover::after(model::PassId id, std::uint32_t micro) {
  const model::Pass& pass = program_.passes[id];
  copy_to_devices(id, micro);
  if (index_.writes_counts(id)) {
    for (const Operand& operand : pass.operands) {
      if (operand.kind != OperandKind::value || operand.access == OperandAccess::reads) continue;
      if (class_of(operand.number).counts) share_counts(operand.number, pass.block, micro);
    }
  }
  if (backward_ || !stores_[id]) return;
  for (const Operand& operand : pass.operands) {
    const bool value = operand.kind == OperandKind::value;
    if (value && stored_after_[operand.number] == id) store(operand.number, micro);
  }
}

void ValueMover::copy_to_devices(model::PassId pass, std::uint32_t micro) {
  const std::uint8_t from = device_of(pass);
  for (const Routes::Copy& copy : routes_->after(pass)) {
    const StepValue& value = program_.values[copy.value];
    const bool step = program_.classes[value.of].buffers == BufferRule::step;
    const auto shared = [&](std::uint8_t device) {
      return slots_.devices[device].shared[value.of][micro];
    };
    const BufferId source = step ? shared(from) : read({copy.value, micro, from});
    const BufferId target =
        step ? shared(copy.to) : begin_life({copy.value, micro, copy.to}, false);
    move(Action::transfer, {copy.value, micro, from}, value.owner,
         {.from = source, .to = target, .bytes = program_.bytes_of(value)});
  }
}

/// Copies the choices of the routers of all ranks to the host.
void ValueMover::share_counts(ValueId id, BlockId block, std::uint32_t micro) {
  const Instance at = {id, micro, placed_.device_of(block)};
  const StepValue& value = program_.values[id];
  const DeviceValues& device = slots_.devices[at.device];
  const Bytes bytes = program_.bytes_of(value);
  const std::size_t place =
      colours_.of_value[id] * placed_.micro_batches_per_stop() + place_among(micro);
  BufferId from = device.shared[value.of][place];
  if (placed_.problem.sharers > 1) {
    const BufferId all = device.of_ranks[value.of][place];
    move(Action::gather, at, block,
         {.from = from, .to = all, .bytes = (placed_.problem.sharers - 1) * bytes});
    from = all;
  }
  move(Action::offload, at, block,
       {.from = from, .to = slots_.counts[id], .bytes = placed_.problem.sharers * bytes});
}

void ValueMover::store(ValueId id, std::uint32_t micro) {
  const Instance at = at_owner(id, micro);
  const StepValue& value = program_.values[id];
  const BufferId home = slots_.own[id][place_among(micro)];
  const Tier tier = placed_.at(value.owner).activations;
  const bool to_nvme = tier == Tier::nvme;
  const BufferId host = to_nvme ? staging_.next() : home;
  move(tier == Tier::device ? Action::keep : Action::offload, at, value.owner,
       {.from = in_ring(at),
        .to = host,
        .bytes = waiting_bytes(placed_.problem, value),
        .from_part = is_partitioned(placed_.problem, value)});
  if (!to_nvme) return;
  move(Action::writeback, at, value.owner,
       {.from = host, .to = home, .bytes = swapped_bytes(placed_.problem, value)});
}

}  // namespace ballast::step
