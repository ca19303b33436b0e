#include "src/step/row_mover.h"

#include <utility>

#include "ballast/step/labels.h"

namespace ballast::step {

RowMover::RowMover(MoveContext& plan, WeightMover& weights)
    : Mover(plan),
      weights_(weights),
      selected_(layout_.table_rows),
      gradients_(layout_.row_gradients),
      kept_(problem_.blocks.size()) {
  for (const DevicePlaces& places : layout_.devices) {
    device_rows_.emplace_back(places.table_rows);
    device_gradients_.emplace_back(places.row_gradients);
  }
}

BufferId RowMover::on_device(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
  BufferId selected = kNoBuffer;
  if (!ahead_.empty() && table_ahead_ == table) {
    selected = ahead_.front();
    ahead_.pop_front();
  } else {
    selected = select(table, micro, tokens);
  }
  const BufferId place = device_rows_[placed_.device_of(table)].next();
  plan_.emit({.action = Action::upload,
              .payload = Payload::value,
              .block = table,
              .micro = micro,
              .label = step::label_of(step::MovedValue::rows),
              .bytes = program_.blocks[table].selected,
              .uses = {{Role::source, selected, false}, {Role::target, place, true}}});
  return place;
}

/// Returns the host buffer with the rows.
BufferId RowMover::select(std::uint32_t table, std::uint32_t micro, BufferId tokens) {
  const BufferId selected = selected_.next();
  plan_.emit({.action = Action::select,
              .payload = Payload::value,
              .block = table,
              .micro = micro,
              .label = step::label_of(step::MovedValue::rows),
              .traffic = 2 * program_.blocks[table].selected,
              .uses = {{Role::source, weights_.on_host(table, {}), false},
                       {Role::tokens, tokens, false},
                       {Role::target, selected, true}}});
  return selected;
}

void RowMover::keep_gradients(std::uint32_t table, std::uint32_t micro, BufferId written,
                              BufferId tokens) {
  const BufferId kept = gradients_.next();
  plan_.emit({.action = Action::offload,
              .payload = Payload::value,
              .block = table,
              .micro = micro,
              .label = step::label_of(step::MovedValue::row_gradients),
              .bytes = program_.blocks[table].row_gradients,
              .uses = {{Role::source, written, false}, {Role::target, kept, true}}});
  kept_[table].push_back({kept, tokens});
}

void RowMover::add_tokens(std::uint32_t block, std::vector<Use>& uses) {
  for (const Kept& rows : kept_[block]) uses.push_back({Role::tokens, rows.tokens, false});
  kept_[block].clear();
}

void RowMover::scatter(std::uint32_t block, BufferId packed) {
  std::vector<Use> uses = {{Role::target, packed, true}};
  if (!rank_.is_distributed(block)) {
    uses.push_back({Role::statistics, layout_.statistics_host[block], true});
  }
  Bytes traffic = rank_.padded_gradient(block);
  for (const Kept& rows : kept_[block]) {
    uses.push_back({Role::source, rows.gradient, false});
    uses.push_back({Role::tokens, rows.tokens, false});
    traffic += program_.blocks[block].row_gradients;
  }
  kept_[block].clear();
  plan_.emit({.action = Action::scatter,
              .payload = Payload::gradient,
              .block = block,
              .traffic = traffic,
              .uses = std::move(uses)});
}

}  // namespace ballast::step
