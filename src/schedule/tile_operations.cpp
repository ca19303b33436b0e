#include "src/schedule/tile_operations.h"

#include <utility>

namespace ballast::schedule {

using model::Kernel;
using model::Port;

std::vector<Use> TileOperations::of_norm(std::uint32_t block, BufferId input, BufferId rows) {
  return {{role_of(Port::weights), move_.weights_on_device(block), false},
          {role_of(Port::input), input, false},
          {role_of(Port::normed), rows, true},
          {role_of(Port::workspace), layout_.workspace, true}};
}

void TileOperations::normalize_reference(std::uint32_t micro, BufferId input) {
  const BufferId rows = layout_.reference_rows[move_.place_among(micro)];
  move_.emit({.block = work_.head(),
              .micro = micro,
              .label = label_of(Kernel::norm, true),
              .traffic = 2 * work_.activation_bytes,
              .uses = of_norm(work_.head(), input, rows)});
}

void TileOperations::normalize(std::uint32_t block, std::uint32_t micro, BufferId input,
                               bool sums) {
  const std::uint32_t place = move_.place_among(micro);
  const auto& rows = block == work_.head() ? layout_.head_rows : layout_.rows;
  std::vector<Use> uses = of_norm(block, input, rows[place]);
  if (sums) uses.push_back({role_of(Port::partial_sums), layout_.row_sums[place], true});
  move_.compute(Kernel::norm, block, micro, std::move(uses), 0.0,
                2 * work_.activation_bytes + (sums ? work_.row_sums_bytes : 0));
}

void TileOperations::route(std::uint32_t block, std::uint32_t micro, BufferId input, Visit visit) {
  const std::uint32_t place = move_.place_among(micro);
  std::vector<Use> uses = of_norm(block, input, layout_.rows[place]);
  // Targets tell rows of padding, which only packed documents have.
  if (work_.packed) uses.push_back({role_of(Port::batch), layout_.batch_device[micro], false});
  const bool again = visit == Visit::again;
  if (!again) {
    uses.push_back({role_of(Port::partial_sums), layout_.row_sums[place], true});
    uses.push_back({role_of(Port::routing), layout_.routing_device[place], true});
  }
  if (visit == Visit::training) {
    uses.push_back({role_of(Port::router_totals), layout_.router_totals[place], true});
    if (block == last_router_) uses.push_back({role_of(Port::losses), layout_.losses_device, true});
  }
  move_.compute(Kernel::router, block, micro, std::move(uses), work_.blocks[block].forward_flops,
                2 * work_.activation_bytes + (again ? 0 : work_.row_sums_bytes));
  if (!again) share_routing(block, micro);
}

/// What all ranks have chosen, to host memory.
void TileOperations::share_routing(std::uint32_t block, std::uint32_t micro) {
  const std::uint32_t place = move_.place_among(micro);
  BufferId routing = layout_.routing_device[place];
  const bool several = work_.world > 1;
  if (several) {
    const BufferId all = layout_.routing_of_ranks[place];
    move_.move_value(Action::gather, MovedValue::routing, block, micro, routing, all,
                     (work_.world - 1) * work_.routing_bytes);
    routing = all;
  }
  move_.move_value(Action::offload, MovedValue::routing, block, micro, routing,
                   layout_.routing_host[block], work_.world * work_.routing_bytes);
}

/// The uses of both passes through a tile of a layer.
std::vector<Use> TileOperations::of_tile(std::uint32_t block, std::uint32_t micro) {
  const std::uint32_t place = move_.place_among(micro);
  std::vector<Use> uses = {{role_of(Port::weights), move_.weights_on_device(block), false},
                           {role_of(Port::normed), layout_.rows[place], false},
                           {role_of(Port::partial_sums), layout_.row_sums[place], true},
                           {role_of(Port::workspace), layout_.workspace, true}};
  if (work_.blocks[block].is_expert) {
    uses.push_back(
        {role_of(Port::routing_counts), layout_.routing_host[work_.first_tile(block)], false});
  } else if (work_.packed) {
    uses.push_back({role_of(Port::batch), layout_.batch_device[micro], false});
  }
  return uses;
}

Kernel TileOperations::kernel(std::uint32_t block, bool backward) const {
  const BlockWork& work = work_.blocks[block];
  if (work.expert_parallel) {
    return backward ? Kernel::exchanged_expert_backward : Kernel::exchanged_expert;
  }
  if (work.is_expert) return backward ? Kernel::expert_backward : Kernel::expert;
  if (work_.blocks[work_.first_tile(block)].routes) {
    return backward ? Kernel::shared_expert_backward : Kernel::shared_expert;
  }
  return backward ? Kernel::tile_backward : Kernel::tile;
}

void TileOperations::compute(bool backward, std::uint32_t block, std::uint32_t micro,
                             std::vector<Use> uses, double flops, Bytes traffic) {
  const BlockWork& work = work_.blocks[block];
  const double ranks = work.expert_parallel ? work_.world : 1.0;
  move_.emit({.block = block,
              .micro = micro,
              .label = label_of(kernel(block, backward)),
              .speed = backward ? Speed::backward : Speed::forward,
              .token_share = static_cast<float>(work.token_share * ranks),
              .bytes = work.expert_parallel ? exchanged_bytes(block, backward) : 0,
              .flops = flops,
              .traffic = traffic,
              .uses = std::move(uses)});
}

/// What a rank receives of rows that travel to experts and back, if all experts have as many: a row
/// and its result, in the backward pass also a gradient of the result.
Bytes TileOperations::exchanged_bytes(std::uint32_t block, bool backward) const {
  const double rows = work_.blocks[block].token_share * (work_.world - 1);
  const Bytes there = (backward ? 2 : 1) * work_.activation_bytes;
  return static_cast<Bytes>(rows * static_cast<double>(there + work_.row_sums_bytes));
}

void TileOperations::forward(std::uint32_t block, std::uint32_t micro, BufferId output) {
  std::vector<Use> uses = of_tile(block, micro);
  const bool last = output != kNoBuffer;
  if (last) uses.push_back({role_of(Port::output), output, true});
  compute(false, block, micro, std::move(uses), work_.blocks[block].forward_flops,
          last ? work_.row_sums_bytes + work_.activation_bytes : 0);
}

void TileOperations::backward(std::uint32_t block, std::uint32_t micro) {
  std::vector<Use> uses = of_tile(block, micro);
  uses.push_back(
      {role_of(Port::activation_gradient), layout_.flow[move_.place_among(micro)], false});
  move_.use_accumulator(uses, block);
  const BlockWork& work = work_.blocks[block];
  // An expert leaves the gradients of its weights beside the routing.
  if (work.is_expert) uses[1].writes = true;
  compute(true, block, micro, std::move(uses), work.backward_flops() + work.recomputed_flops, 0);
}

void TileOperations::norm_backward(std::uint32_t block, std::uint32_t micro, BufferId input) {
  const std::uint32_t place = move_.place_among(micro);
  const bool routes = work_.blocks[block].routes;
  std::vector<Use> uses = {{role_of(Port::weights), move_.weights_on_device(block), false},
                           {role_of(Port::input), input, false},
                           {role_of(Port::partial_sums), layout_.row_sums[place], routes},
                           {role_of(Port::activation_gradient), layout_.flow[place], true},
                           {role_of(Port::workspace), layout_.workspace, true}};
  move_.use_accumulator(uses, block);
  if (routes) {
    uses.push_back({role_of(Port::normed), layout_.rows[place], false});
    uses.push_back({role_of(Port::router_totals), layout_.router_totals[place], false});
  }
  move_.compute(routes ? Kernel::router_backward : Kernel::norm_backward, block, micro,
                std::move(uses), routes ? work_.blocks[block].backward_flops() : 0.0,
                3 * work_.activation_bytes + work_.row_sums_bytes);
}

}  // namespace ballast::schedule
