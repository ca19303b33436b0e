#include "src/engine/arguments.h"

#include "ballast/core/error.h"

namespace ballast::engine {

using model::Kernel;
using model::Port;
using schedule::Action;

Kernel PassBuffers::forward_kernel() const {
  if (blueprint_.workload.is_embedding(operation_.block)) return Kernel::embed;
  if (work().expert_parallel) return Kernel::exchanged_expert;
  if (work().is_expert) return Kernel::expert;
  if (!has(Role::rows)) return Kernel::layer;
  const bool shared =
      blueprint_.model.blocks[operation_.block].part == model::LayerPart::shared_expert;
  return shared ? Kernel::shared_expert : Kernel::tile;
}

Kernel PassBuffers::backward_kernel() const {
  switch (forward_kernel()) {
    case Kernel::embed:
      return Kernel::embed_backward;
    case Kernel::exchanged_expert:
      return Kernel::exchanged_expert_backward;
    case Kernel::expert:
      return Kernel::expert_backward;
    case Kernel::shared_expert:
      return Kernel::shared_expert_backward;
    default:
      if (work().routes) return Kernel::router_backward;
      if (has(Role::rows)) return Kernel::tile_backward;
      return has(Role::row_sums) ? Kernel::norm_backward : Kernel::layer_backward;
  }
}

Kernel PassBuffers::kernel() const {
  switch (operation_.action) {
    case Action::forward:
      return forward_kernel();
    case Action::backward:
      return backward_kernel();
    case Action::normalize:
      return Kernel::norm;
    case Action::route:
      return Kernel::router;
    case Action::evaluate_head:
      return Kernel::head_evaluate;
    case Action::train_head:
      return Kernel::head_train;
    case Action::scan_head:
      return Kernel::head_scan;
    case Action::differentiate_head:
      return Kernel::head_differentiate;
    case Action::end_head:
      return Kernel::head_end;
    default:
      throw Error(ErrorCategory::state, "the operation's action does not belong to its lane");
  }
}

Port PassBuffers::port_of(Role role) const {
  switch (role) {
    case Role::weights:
      return Port::weights;
    case Role::output_weights:
      return Port::output_weights;
    case Role::batch:
      return Port::batch;
    case Role::input:
      return Port::input;
    case Role::output:
      return Port::output;
    case Role::gradient_flow:
      return Port::activation_gradient;
    case Role::intermediates:
      return Port::kept;
    case Role::rows:
      return Port::normed;
    case Role::row_sums:
      return Port::partial_sums;
    case Role::routing:
      return work().routes ? Port::routing : Port::routing_counts;
    case Role::router_totals:
      return Port::router_totals;
    case Role::losses:
      return Port::losses;
    case Role::pairs:
      return Port::pairs;
    case Role::accumulator:
      return Port::gradient;
    case Role::output_accumulator:
      return Port::output_gradient;
    case Role::workspace:
      return Port::workspace;
    default:
      throw Error(ErrorCategory::state, "a pass has no such argument");
  }
}

std::uint32_t PassBuffers::tile() const {
  const schedule::Workload& work = blueprint_.workload;
  if (work.tied) return work.is_embedding(operation_.block) ? operation_.block : 0;
  return operation_.block < work.head() ? 0 : operation_.block - work.head();
}

model::Pass PassBuffers::pass() const {
  model::Pass pass = {.kernel = kernel(),
                      .block = operation_.block,
                      .reference = static_cast<std::uint8_t>(operation_.reference),
                      .number = tile()};
  for (const Use& use : operation_.uses) pass.operands.push_back({.port = port_of(use.role)});
  return pass;
}

DeviceBytes PassBuffers::losses(const Use& use) const {
  const bool router = operation_.action == Action::route;
  const Bytes bytes = (router ? kRouterLosses : blueprint_.head_losses()) * sizeof(double);
  const Bytes before = router ? first_router_loss() * sizeof(double) : 0;
  return device(use, blueprint_.workload.losses_bytes)
      .subview(before + operation_.micro * bytes, bytes);
}

DeviceBytes PassBuffers::view(const Use& use, Port port) const {
  const schedule::Workload& workload = blueprint_.workload;
  switch (port) {
    case Port::weights:
      return weights();
    case Port::losses:
      return losses(use);
    case Port::batch:
      return device(use, workload.batch_bytes);
    case Port::kept:
      return device(use, work().intermediate_bytes);
    case Port::normed:
      return device(use, workload.rows_bytes);
    case Port::partial_sums:
      return device(use, workload.row_sums_bytes);
    case Port::routing:
      return device(use, workload.routing_bytes);
    case Port::router_totals:
      return device(use, workload.router_totals_bytes);
    case Port::pairs:
      return device(use, workload.pairs_bytes);
    case Port::gradient:
      return device(use, work().accumulator_bytes);
    default:
      return device(use, activation_bytes());
  }
}

model::PassArguments PassBuffers::arguments(const model::PassScalars& scalars,
                                            model::RowExchange* exchange) const {
  model::PassArguments arguments;
  arguments.scalars = scalars;
  arguments.exchange = exchange;
  // The whole head has the first tile in its own block, unless the output matrix is tied.
  const bool whole = operation_.action == Action::train_head;
  const std::size_t first = whole && !blueprint_.workload.tied ? 1 : tile();
  for (const Use& use : operation_.uses) {
    const Port port = port_of(use.role);
    switch (port) {
      case Port::workspace:
        break;
      case Port::routing_counts:
        arguments.routing_counts = routing_of(use.buffer, operation_.micro);
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(view(use, port), blueprint_.shape.tokens());
        break;
      case Port::output_weights:
        arguments.output_weights.push_back(weights_of(
            use.buffer, blueprint_.model.tile(first + arguments.output_weights.size()).block));
        break;
      case Port::output_gradient:
        arguments.output_gradient.push_back(
            gradient_of_tile(use.buffer, first + arguments.output_gradient.size()));
        break;
      default:
        arguments[port] = view(use, port);
    }
  }
  return arguments;
}

}  // namespace ballast::engine
