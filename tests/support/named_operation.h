#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "ballast/plan/plan.h"
#include "ballast/step/labels.h"

#include "src/step/plan_types.h"

namespace ballast::step::named {

// Operations of plans with the names of a model: an action for each kind of pass and each kind of
// data, and roles that say which data a buffer holds. Tests that know the meaning of operations
// read these.

enum class Action : std::uint8_t {
  upload_batch,
  fetch_weights,
  upload_weights,
  gather_weights,
  decode_weights,
  normalize,  ///< the norm before tiles
  route,      ///< the norm before experts, and the choice of experts
  gather_routing,
  offload_routing,
  forward,
  evaluate_head,
  train_head,
  scan_head,
  differentiate_head,
  end_head,
  offload_activation,
  writeback_activation,
  fetch_activation,
  upload_activation,
  clear_gradient,
  backward,
  pack_gradient,
  reduce_gradient,
  offload_gradient,
  writeback_gradient,
  fetch_gradient,
  offload_statistics,
  offload_losses,
  gate,
  fetch_states,
  upload_states,
  offload_weights,
  offload_states,
  update_on_host,
  update_on_device,
  writeback_weights,
  writeback_states,
  initialize,
  read
};

enum class Role : std::uint8_t {
  weights,
  weights_source,
  output_weights,
  batch,
  batch_source,
  input,
  output,
  gradient_flow,  ///< gradient of an activation
  intermediates,
  accumulator,
  output_accumulator,
  rows,  ///< the norm's result
  routing,
  routing_source,
  router_totals,
  row_sums,  ///< sums over tiles
  gradient,  ///< packed
  gradient_source,
  states,
  states_source,
  statistics,
  statistics_source,
  losses,
  pairs,
  losses_source,
  verdict,
  undo_weights,
  undo_states,
  workspace
};

/// The action of a pass.
inline Action action_of(model::Kernel kernel) {
  using model::Kernel;
  switch (kernel) {
    case Kernel::norm:
      return Action::normalize;
    case Kernel::router:
      return Action::route;
    case Kernel::head_evaluate:
      return Action::evaluate_head;
    case Kernel::head_train:
      return Action::train_head;
    case Kernel::head_scan:
      return Action::scan_head;
    case Kernel::head_differentiate:
      return Action::differentiate_head;
    case Kernel::head_end:
      return Action::end_head;
    case Kernel::embed:
    case Kernel::layer:
    case Kernel::tile:
    case Kernel::shared_expert:
    case Kernel::expert:
    case Kernel::exchanged_expert:
      return Action::forward;
    default:
      return Action::backward;
  }
}

/// The action of a movement. Throws where there is no such movement.
inline Action movement_of(const plan::Operation& operation) {
  struct Movement {
    plan::Action action;
    plan::Payload payload;
    Action named;
  };
  using A = plan::Action;
  using P = plan::Payload;
  static constexpr Movement kMovements[] = {
      {A::fetch, P::weights, Action::fetch_weights},
      {A::upload, P::weights, Action::upload_weights},
      {A::gather, P::weights, Action::gather_weights},
      {A::offload, P::weights, Action::offload_weights},
      {A::writeback, P::weights, Action::writeback_weights},
      {A::decode, P::weights, Action::decode_weights},
      {A::fetch, P::states, Action::fetch_states},
      {A::upload, P::states, Action::upload_states},
      {A::offload, P::states, Action::offload_states},
      {A::writeback, P::states, Action::writeback_states},
      {A::clear, P::gradient, Action::clear_gradient},
      {A::pack, P::gradient, Action::pack_gradient},
      {A::reduce, P::gradient, Action::reduce_gradient},
      {A::offload, P::gradient, Action::offload_gradient},
      {A::writeback, P::gradient, Action::writeback_gradient},
      {A::fetch, P::gradient, Action::fetch_gradient},
      {A::offload, P::statistics, Action::offload_statistics}};
  struct ValueMovement {
    plan::Action action;
    MovedValue value;
    Action named;
  };
  static constexpr ValueMovement kValues[] = {
      {A::upload, MovedValue::batch, Action::upload_batch},
      {A::gather, MovedValue::routing, Action::gather_routing},
      {A::offload, MovedValue::routing, Action::offload_routing},
      {A::offload, MovedValue::losses, Action::offload_losses},
      {A::offload, MovedValue::activation, Action::offload_activation},
      {A::writeback, MovedValue::activation, Action::writeback_activation},
      {A::fetch, MovedValue::activation, Action::fetch_activation},
      {A::upload, MovedValue::activation, Action::upload_activation}};
  for (const Movement& one : kMovements) {
    if (operation.action == one.action && operation.payload == one.payload) return one.named;
  }
  for (const ValueMovement& one : kValues) {
    if (operation.action == one.action && moves(operation, one.value)) return one.named;
  }
  throw std::logic_error("a movement without a name");
}

inline Action action_of(const plan::Operation& operation) {
  switch (operation.action) {
    case plan::Action::compute:
      return action_of(kernel_of(operation));
    case plan::Action::gate:
      return Action::gate;
    case plan::Action::update:
      return Action::update_on_host;
    case plan::Action::update_on_device:
      return Action::update_on_device;
    case plan::Action::initialize:
      return Action::initialize;
    case plan::Action::read:
      return Action::read;
    default:
      return movement_of(operation);
  }
}

/// The role of what a pass binds to a port.
inline Role role_of(model::Port port) {
  static constexpr Role kRoles[] = {
      Role::weights,  Role::output_weights, Role::batch,         Role::input,
      Role::output,   Role::gradient_flow,  Role::intermediates, Role::rows,
      Role::row_sums, Role::routing,        Role::routing,       Role::router_totals,
      Role::losses,   Role::pairs,          Role::accumulator,   Role::output_accumulator,
      Role::workspace};
  static_assert(std::size(kRoles) == model::kPortCount);
  return kRoles[static_cast<std::size_t>(port)];
}

/// The role of the source or target of a movement.
inline Role moved_role(const plan::Operation& operation, bool source) {
  switch (operation.payload) {
    case Payload::weights:
      return source ? Role::weights_source : Role::weights;
    case Payload::states:
      return source ? Role::states_source : Role::states;
    case Payload::gradient:
      return source ? Role::gradient_source : Role::gradient;
    case Payload::statistics:
      return source ? Role::statistics_source : Role::statistics;
    default:
      break;
  }
  if (moves(operation, MovedValue::batch)) return source ? Role::batch_source : Role::batch;
  if (moves(operation, MovedValue::routing)) return source ? Role::routing_source : Role::routing;
  if (moves(operation, MovedValue::losses)) return source ? Role::losses_source : Role::losses;
  return source ? Role::input : Role::output;
}

inline Role role_of(const plan::Operation& operation, const plan::Use& use) {
  using A = plan::Action;
  const auto first_port = static_cast<unsigned>(plan::Role::first_port);
  const auto number = static_cast<unsigned>(use.role);
  if (number >= first_port) return role_of(static_cast<model::Port>(number - first_port));
  switch (use.role) {
    case plan::Role::source:
      if (operation.action == A::pack) return Role::accumulator;
      return moved_role(operation, operation.action != A::read);
    case plan::Role::target:
      if (operation.action == A::clear) return Role::accumulator;
      // Zeros for homes.
      if (operation.action == A::initialize && operation.payload == Payload::gradient) {
        return Role::output;
      }
      return moved_role(operation, false);
    case plan::Role::weights:
      return Role::weights;
    case plan::Role::states:
      return Role::states;
    case plan::Role::gradient:
      return Role::gradient;
    case plan::Role::added_gradient:
      return Role::output_accumulator;
    case plan::Role::statistics:
      return Role::statistics;
    case plan::Role::losses:
      return Role::losses;
    case plan::Role::decision:
      return Role::verdict;
    case plan::Role::undo_weights:
      return Role::undo_weights;
    case plan::Role::undo_states:
      return Role::undo_states;
    case plan::Role::counts:
      return Role::routing;
    default:
      return Role::workspace;
  }
}

struct Use {
  Role role = Role::workspace;
  BufferId buffer = kNoBuffer;
  bool writes = false;
  bool shard = false;
};

/// An operation with these names. It refers to the operation from which it is made.
struct Operation {
  explicit Operation(const plan::Operation& operation)
      : plain(operation), action(action_of(operation)) {
    uses.reserve(operation.uses.size());
    for (const plan::Use& use : operation.uses) {
      uses.push_back({role_of(operation, use), use.buffer, use.writes, use.shard});
    }
  }

  [[nodiscard]] Use use(Role role) const {
    const auto found =
        std::find_if(uses.begin(), uses.end(), [role](const Use& use) { return use.role == role; });
    return found == uses.end() ? Use{.role = role} : *found;
  }
  [[nodiscard]] BufferId buffer(Role role) const { return use(role).buffer; }

  const plan::Operation& plain;
  Action action;
  std::vector<Use> uses;
  Lane lane = plain.lane;
  std::uint32_t block = plain.block;
  std::uint32_t micro = plain.micro;
  std::uint32_t sub_group = plain.sub_group;
  std::uint32_t lag = plain.lag;
  Speculation speculation = plain.speculation;
  const Condition& condition = plain.condition;
  const std::optional<Condition>& unless = plain.unless;
  Bytes bytes = plain.bytes;
  Bytes offset = plain.offset;
  double flops = plain.flops;
};

}  // namespace ballast::step::named
