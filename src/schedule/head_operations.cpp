#include "src/schedule/head_operations.h"

#include <algorithm>
#include <utility>

namespace ballast::schedule {

using model::Kernel;
using model::Port;

/// What an operation that knows the losses of all rows reports to. The trained model's compares its
/// own with the reference's.
void HeadOperations::use_losses(std::vector<Use>& uses, std::uint32_t micro, bool reference) const {
  if (!reference) uses.push_back({role_of(Port::losses), layout_.losses_device, true});
  if (work_.has_reference()) uses.push_back({role_of(Port::pairs), layout_.pairs[micro], true});
}

/// The uses of an operation on the whole head.
std::vector<Use> HeadOperations::whole(std::uint32_t micro, BufferId input, bool reference) {
  std::vector<Use> uses = {{role_of(Port::weights), move_.weights_on_device(work_.head()), false},
                           {role_of(Port::input), input, false},
                           {role_of(Port::batch), layout_.batch_device[micro], false},
                           {role_of(Port::workspace), layout_.workspace, true}};
  use_losses(uses, micro, reference);
  for (std::uint32_t t = 0; t < tiles(); ++t) {
    const std::uint32_t block = work_.block_of_tile(t);
    if (block == work_.head()) continue;
    uses.push_back({role_of(Port::output_weights), move_.weights_on_device(block), false});
  }
  return uses;
}

void HeadOperations::evaluate(std::uint32_t micro, BufferId input, bool reference) {
  move_.emit({.block = work_.head(),
              .micro = micro,
              .label = label_of(Kernel::head_evaluate, reference),
              .speed = Speed::head,
              .flops = work_.blocks[work_.head()].forward_flops,
              .uses = whole(micro, input, reference)});
}

void HeadOperations::train(std::uint32_t micro, BufferId input) {
  std::vector<Use> uses = whole(micro, input, false);
  uses.push_back(
      {role_of(Port::activation_gradient), layout_.flow[move_.place_among(micro)], true});
  move_.use_accumulator(uses, work_.head());
  double flops = 0.0;
  for (std::uint32_t t = 0; t < tiles(); ++t) {
    // The logits of pairs are computed twice.
    flops += ((is_trained(t) ? 3.0 : 2.0) + (work_.has_reference() ? 1.0 : 0.0)) * flops_of_tile(t);
    const std::uint32_t block = work_.block_of_tile(t);
    if (block == work_.head() || !is_trained(t)) continue;
    uses.push_back({role_of(Port::output_gradient),
                    work_.tied ? layout_.output_accumulator[t] : layout_.accumulator[block], true});
  }
  const std::vector<BufferId>& logits = layout_.intermediates[work_.head()];
  if (!logits.empty()) uses.push_back({role_of(Port::kept), logits.front(), true});
  move_.compute(Kernel::head_train, work_.head(), micro, std::move(uses), flops);
}

/// Where visit() has Port::normed.
constexpr std::size_t kRows = 2;

/// The uses of an operation on a part of the head that is in `block`. `sums`: it adds to what is
/// known of the rows.
std::vector<Use> HeadOperations::visit(std::uint32_t block, std::uint32_t micro, bool sums) {
  return {{role_of(Port::weights), move_.weights_on_device(block), false},
          {role_of(Port::batch), layout_.batch_device[micro], false},
          {role_of(Port::normed), layout_.head_rows[move_.place_among(micro)], sums},
          {role_of(Port::workspace), layout_.workspace, true}};
}

void HeadOperations::scan(std::uint32_t tile, std::uint32_t micro, bool reference) {
  const std::uint32_t block = work_.block_of_tile(tile);
  std::vector<Use> uses = visit(block, micro, true);
  if (reference) uses[kRows].buffer = layout_.reference_rows[move_.place_among(micro)];
  // The gradients of pairs depend on the losses.
  if (work_.has_reference() && tile + 1 == tiles()) use_losses(uses, micro, reference);
  move_.emit({.block = block,
              .micro = micro,
              .label = label_of(Kernel::head_scan, reference),
              .speed = Speed::head,
              .flops = flops_of_tile(tile),
              .uses = std::move(uses)});
}

void HeadOperations::differentiate(std::uint32_t tile, std::uint32_t micro) {
  const std::uint32_t block = work_.block_of_tile(tile);
  std::vector<Use> uses = visit(block, micro, false);
  uses.push_back({role_of(Port::partial_sums), layout_.row_sums[move_.place_among(micro)], true});
  if (work_.has_reference()) uses.push_back({role_of(Port::pairs), layout_.pairs[micro], false});
  if (!work_.tied && is_trained(tile)) move_.use_accumulator(uses, block);
  move_.compute(Kernel::head_differentiate, block, micro, std::move(uses),
                (work_.tied || !is_trained(tile) ? 2.0 : 3.0) * flops_of_tile(tile));
}

void HeadOperations::differentiate_tied(std::uint32_t tile, std::uint32_t micro) {
  std::vector<Use> uses = visit(tile, micro, false);
  uses.push_back({role_of(Port::output_gradient), layout_.output_accumulator[tile], true});
  move_.compute(Kernel::head_differentiate, tile, micro, std::move(uses),
                2.0 * flops_of_tile(tile));
}

void HeadOperations::end(std::uint32_t micro, BufferId input, bool training) {
  const std::uint32_t block = work_.head();
  std::vector<Use> uses = visit(block, micro, false);
  if (!work_.has_reference()) uses.push_back({role_of(Port::losses), layout_.losses_device, true});
  if (training) {
    uses.push_back({role_of(Port::input), input, false});
    uses.push_back(
        {role_of(Port::partial_sums), layout_.row_sums[move_.place_among(micro)], false});
    uses.push_back(
        {role_of(Port::activation_gradient), layout_.flow[move_.place_among(micro)], true});
    move_.use_accumulator(uses, block);
  }
  move_.compute(Kernel::head_end, block, micro, std::move(uses), 0.0, 4 * work_.activation_bytes);
}

void HeadOperations::mark(Plan& plan) const {
  const auto begins_head = [&](const Operation& operation) {
    return runs(operation, Kernel::head_train) ||
           (runs(operation, Kernel::norm) && operation.block == work_.head());
  };
  const auto embeds = [](const Operation& operation) { return runs(operation, Kernel::embed); };
  const std::vector<Operation>& all = plan.operations;
  const auto first = std::find_if(all.begin(), all.end(), begins_head);
  const auto embedded = std::find_if(all.rbegin(), all.rend(), embeds).base();
  const auto last = std::find_if(std::max(first, embedded), all.end(), begins_head);
  if (first != all.end()) plan.first_head = static_cast<OpId>(first - all.begin());
  if (last != all.end()) plan.last_head = static_cast<OpId>(last - all.begin());
}

/// Whether the output matrix's tile has a gradient.
bool HeadOperations::is_trained(std::uint32_t tile) const {
  return work_.tied ? work_.trains_tied()
                    : work_.blocks[work_.block_of_tile(tile)].frozen_flops == 0.0;
}

/// Tiles have nearly the same size.
double HeadOperations::flops_of_tile(std::uint32_t tile) const {
  if (!work_.tied) return work_.blocks[work_.block_of_tile(tile)].forward_flops;
  return work_.blocks[work_.head()].forward_flops / work_.vocabulary_tiles;
}

}  // namespace ballast::schedule
