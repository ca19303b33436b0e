#include "src/step/values.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ballast/step/labels.h"
#include "ballast/step/lives.h"

#include "src/step/plan_types.h"

namespace ballast::step {

using model::BlockId;
using model::kNone;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::SlotRule;
using model::StepValue;
using model::ValueId;
using model::Waits;

Values::Values(const PlacedProblem& placed, const ValueSlots& slots, Movements& movements,
               std::uint32_t micro_batches)
    : table_(*placed.problem.table),
      program_(table_.program()),
      colours_(table_.colours(placed.form, placed.trains())),
      placed_(placed),
      slots_(slots),
      move_(movements),
      micro_batches_(micro_batches),
      staging_(slots.staging),
      in_ring_(program_.values.size() * micro_batches, kNoBuffer),
      stored_after_(program_.values.size(), kNone),
      stores_(program_.passes.size(), false),
      brought_(micro_batches) {
  rings_.reserve(program_.classes.size());
  for (const auto& shared : slots.shared) rings_.emplace_back(shared);
}

void Values::store_along(const std::vector<const model::Stop*>& stops) {
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
  return of.slots == SlotRule::report ? step::MovedValue::losses : step::MovedValue::activation;
}

}  // namespace

void Values::move(Action action, ValueId value, BlockId block, std::uint32_t micro, BufferId from,
                  BufferId to, Bytes bytes) {
  move_.emit({.action = action,
              .payload = Payload::value,
              .block = block,
              .micro = micro,
              .label = step::label_of(kind_of(class_of(value))),
              .bytes = bytes,
              .uses = {{Role::source, from, false}, {Role::target, to, true}}});
}

void Values::upload_inputs(std::uint32_t micro) {
  for (ValueId v = 0; v < program_.values.size(); ++v) {
    const StepValue& value = program_.values[v];
    if (!program_.classes[value.of].from_host) continue;
    move(Action::upload, v, value.owner, micro, slots_.on_host[value.of][micro],
         slots_.shared[value.of][micro], program_.bytes_of(value));
  }
}

void Values::offload_report() {
  Bytes bytes = 0;
  ValueId first = kNone;
  for (ValueId v = 0; v < program_.values.size(); ++v) {
    if (class_of(v).slots != SlotRule::report) continue;
    if (first == kNone) first = v;
  }
  for (const model::ValueClass& of : program_.classes) {
    if (of.slots == SlotRule::report) bytes += placed_.problem.micro_batches * of.bytes;
  }
  move(Action::offload, first, 0, 0, slots_.report, slots_.report_on_host, bytes);
}

void Values::fill_homes() {
  if (slots_.staging.empty()) return;
  const BufferId staging = staging_.next();
  std::vector<ValueId> on_nvme;
  Bytes largest = 0;
  for (ValueId id = 0; id < program_.values.size(); ++id) {
    const StepValue& value = program_.values[id];
    if (!placed_.leaves(value) || placed_.at(value.owner).activations != Tier::nvme) continue;
    on_nvme.push_back(id);
    largest = std::max(largest, swapped_bytes(program_, value));
  }
  move_.fill_with_zeros(Payload::value, program_.values[on_nvme.front()].owner, staging, largest);
  for (const ValueId id : on_nvme) {
    const StepValue& value = program_.values[id];
    for (std::uint32_t m = 0; m < slots_.own[id].size(); ++m) {
      move(Action::writeback, id, value.owner, m, staging, slots_.own[id][m],
           swapped_bytes(program_, value));
    }
  }
}

bool Values::binds(const Operand& operand) const {
  if (!operand.optional || operand.kind != OperandKind::value) return true;
  return placed_.keeps(program_.values[operand.number]);
}

BufferId Values::bind(const Operand& operand, std::uint32_t micro) {
  const ValueId value = operand.number;
  if (is_on_host(program_, operand)) return slots_.counts[value];
  switch (class_of(value).slots) {
    case SlotRule::report:
      return slots_.report;
    case SlotRule::scratch:
      return slots_.shared[program_.values[value].of].front();
    case SlotRule::step:
      return slots_.shared[program_.values[value].of][micro];
    case SlotRule::own:
    case SlotRule::in_turn:
      break;
  }
  return operand.access == OperandAccess::writes ? begin_life(value, micro) : read(value, micro);
}

/// A waiting value has its own buffer. In a schedule for evaluation no value waits.
BufferId Values::begin_life(ValueId id, std::uint32_t micro) {
  const StepValue& value = program_.values[id];
  const bool waits = (placed_.keeps(value) && !placed_.leaves(value)) ||
                     (placed_.trains() && value.waits == Waits::placed && !placed_.leaves(value));
  if (waits) return slots_.own[id][place_among(micro)];
  const model::ClassId in_evaluation = program_.classes[value.of].in_evaluation;
  const bool passes = !placed_.trains() && in_evaluation != kNone;
  if (passes || class_of(id).slots == SlotRule::in_turn) {
    return in_ring(id, micro) = rings_[passes ? in_evaluation : value.of].next();
  }
  const std::size_t colour = colours_.of_value[id];
  return slots_.shared[value.of][colour * placed_.micro_batches_per_stop() + place_among(micro)];
}

/// Returns the place where its life began, or where it was brought back.
BufferId Values::read(ValueId id, std::uint32_t micro) {
  if (backward_ && placed_.leaves(program_.values[id])) return bring_back(id, micro);
  const BufferId ring = in_ring(id, micro);
  return ring != kNoBuffer ? ring : begin_life(id, micro);
}

/// The value stays until another value of the micro-batch is brought back.
BufferId Values::bring_back(ValueId id, std::uint32_t micro) {
  Brought& last = brought_[micro];
  if (last.value == id) return last.buffer;
  const StepValue& value = program_.values[id];
  const BufferId home = slots_.own[id][place_among(micro)];
  BufferId host = home;
  if (placed_.at(value.owner).activations == Tier::nvme) {
    host = staging_.next();
    move(Action::fetch, id, value.owner, micro, home, host, swapped_bytes(program_, value));
  }
  const BufferId slot = rings_[value.of].next();
  move(Action::upload, id, value.owner, micro, host, slot, program_.bytes_of(value));
  last = {id, slot};
  return slot;
}

void Values::after(model::PassId id, std::uint32_t micro) {
  const model::Pass& pass = program_.passes[id];
  if (table_.writes_counts(id)) {
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

/// Copies the choices of the routers of all ranks to the host.
void Values::share_counts(ValueId id, BlockId block, std::uint32_t micro) {
  const StepValue& value = program_.values[id];
  const Bytes bytes = program_.bytes_of(value);
  const std::size_t place =
      colours_.of_value[id] * placed_.micro_batches_per_stop() + place_among(micro);
  BufferId from = slots_.shared[value.of][place];
  if (placed_.problem.sharers > 1) {
    const BufferId all = slots_.of_ranks[value.of][place];
    move(Action::gather, id, block, micro, from, all, (placed_.problem.sharers - 1) * bytes);
    from = all;
  }
  move(Action::offload, id, block, micro, from, slots_.counts[id], placed_.problem.sharers * bytes);
}

void Values::store(ValueId id, std::uint32_t micro) {
  const StepValue& value = program_.values[id];
  const BufferId home = slots_.own[id][place_among(micro)];
  const bool to_nvme = placed_.at(value.owner).activations == Tier::nvme;
  const BufferId host = to_nvme ? staging_.next() : home;
  move(Action::offload, id, value.owner, micro, in_ring(id, micro), host, program_.bytes_of(value));
  if (!to_nvme) return;
  move(Action::writeback, id, value.owner, micro, host, home, swapped_bytes(program_, value));
}

}  // namespace ballast::step
