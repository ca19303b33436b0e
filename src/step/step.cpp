#include "ballast/step/labels.h"
#include "ballast/step/program_index.h"

#include "src/step/step_writer.h"

// The story of a step. A model's work is a list of stops (model/step_program.h). This file brings
// the data of each stop to it and takes its results away.

namespace ballast::step {

Plan StepWriter::training_step(bool applies_updates) {
  // A step after another gated step begins with the pending updates of that step.
  applies_updates_ = applies_updates && leaves_updates();
  if (!applies_updates_) updates_.omit_updates_of_forward();

  const std::vector<const Stop*> stops = stops_of(program_.training, placed_.form);
  values_.route_along(placed_.training_routes);
  values_.store_along(stops);
  for (std::uint32_t m = 0; m < micro_batches_; ++m) values_.upload_inputs(m);
  // With one micro-batch at a time, the sums of all blocks are in use at once, or they wait in host
  // memory.
  const bool offloads_sums = placed_.offloads_sums();
  if (!is_layer_major() && !offloads_sums) clear_all_sums();

  for (const Group& group : groups()) {
    begin(group);
    for (auto at = stops.begin(); at != stops.end(); ++at) {
      const Stop* const stop = *at;
      values_.begin(*stop);
      // Updates of the preceding step come before the first pass of their block.
      arrive(*stop, group);
      // Weights of experts may move before the stop's routers have chosen.
      prefetch(*stop);
      // The backward pass reads values that were not kept.
      recompute(*stop, group);
      // The first pass that adds to a sum finds it empty.
      if (is_layer_major()) clear_sums(*stop);
      if (offloads_sums) bring_sums(*stop, group);

      compute(*stop, group);

      if (!group.last) {
        if (offloads_sums) offload_sums(*stop, group);
        continue;
      }
      // The lane that packs gradients of tables and updates blocks first selects rows for the next
      // stop.
      if (at + 1 != stops.end() && stop->backward) select_ahead(**(at + 1), group);
      // Complete gradients go to the memory where their update reads them.
      for (const BlockId block : stop->finishes) finish(block);
    }
  }
  // The host receives losses and the norm of all gradients, and decides about the updates.
  values_.offload_report();
  const OpId gate = gradients_.gate(true);

  Plan plan = plan_.finish();
  plan.gate = gate;
  plan.first_head = first_head_;
  plan.last_head = last_head_;
  plan.applies_updates = applies_updates_;
  plan.leaves_updates = leaves_updates();
  return plan;
}

Plan StepWriter::evaluation() {
  values_.route_along(placed_.evaluation_routes);
  for (std::uint32_t m = 0; m < micro_batches_; ++m) values_.upload_inputs(m);
  for (const Group& group : groups()) {
    begin(group);
    for (const Stop* stop : stops_of(program_.evaluation, model::HeadForm::visits)) {
      values_.begin(*stop);
      compute(*stop, group);
    }
  }
  values_.offload_report();
  const OpId done = gradients_.gate(false);

  Plan plan = plan_.finish();
  plan.gate = done;
  return plan;
}

/// Applies the pending updates of a gated step, without a step.
Plan StepWriter::flush() {
  for (BlockId b = 0; b < blocks(); ++b) {
    if (is_updated_in_forward(b)) updates_.update(b, 1);
  }
  Plan plan = plan_.finish();
  plan.applies_updates = true;
  return plan;
}

/// Like flush(); also undoes speculative updates and repeats them as decided by the gate.
Plan StepWriter::rollback() {
  if (!placed_.any_speculates()) return {};
  // In the order of the next forward pass, so that it may begin. States that were prefetched come
  // first, because repetitions use their buffers.
  for (const bool ahead : {true, false}) {
    for (BlockId b = 0; b < blocks(); ++b) {
      const bool pending = is_updated_in_forward(b);
      if ((pending && updates_.has_states_ahead(b)) != ahead) continue;
      if (pending || placed_.speculates(b)) updates_.update(b, 1);
    }
  }
  Plan plan = plan_.finish();
  plan.applies_updates = true;
  return plan;
}

/// Writes the initial values of all homes.
Plan StepWriter::fill(Homes homes) {
  for (BlockId b = 0; b < blocks(); ++b) homes_.fill(b, homes);
  values_.fill_homes();
  homes_.fill_gradients();
  return plan_.finish();
}

/// Passes weights and states of some blocks to a visitor on the host.
Plan StepWriter::read(BlockId first, std::uint32_t count, Homes homes) {
  for (BlockId b = first; b < first + count; ++b) homes_.read(b, homes);
  return plan_.finish();
}

}  // namespace ballast::step
