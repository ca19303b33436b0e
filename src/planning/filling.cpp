#include "src/planning/filling.h"

#include <algorithm>

#include "ballast/engine/blueprint.h"

namespace ballast::planning {
namespace {

using schedule::BlockPlacement;
using schedule::Placement;

bool takes_weights(Movable kind) {
  return kind == Movable::weights || kind == Movable::both;
}

bool takes_optimizer(Movable kind) {
  return kind == Movable::optimizer || kind == Movable::both;
}

std::vector<std::size_t> chosen(const std::vector<std::size_t>& blocks, std::size_t count,
                                Pattern pattern) {
  const std::size_t n = blocks.size();
  std::vector<std::size_t> out;
  out.reserve(count);
  for (std::size_t i = 0; i < n; ++i) {
    const bool taken = pattern == Pattern::first  ? i < count
                       : pattern == Pattern::last ? i >= n - count
                                                  : (i + 1) * count / n > i * count / n;
    if (taken) out.push_back(blocks[i]);
  }
  return out;
}

Placement moved_to(Placement placement, const Move& move, const std::vector<std::size_t>& blocks,
                   std::size_t count) {
  for (const std::size_t b : chosen(blocks, count, move.pattern)) {
    BlockPlacement& block = placement.blocks[b];
    if (takes_weights(move.kind)) block.weights = move.tier;
    if (takes_optimizer(move.kind)) block.optimizer = move.tier;
    if (move.kind == Movable::activations) block.activations = move.tier;
    if (move.kind == Movable::intermediates) block.keeps_intermediates = true;
  }
  return placement;
}

}  // namespace

Placement Filler::lowest() const {
  Placement placement;
  placement.blocks.reserve(constraints_.size());
  for (std::size_t b = 0; b < constraints_.size(); ++b) {
    const PlacementConstraint& constraint = constraints_[b];
    // The embedding has no input; the head consumes its own at once.
    const bool layer = schedule::is_layer(b, constraints_.size());
    placement.blocks.push_back({constraint.weights.value_or(Tier::nvme),
                                constraint.optimizer.value_or(Tier::nvme),
                                constraint.activations.value_or(layer ? Tier::nvme : Tier::device),
                                layer && !constraint.recompute.value_or(true)});
  }
  return placement;
}

memory::Ledger Filler::ledger(const Placement& placement, const schedule::Options& options) const {
  return engine::make_ledger(schedule::list_buffers(work_, placement, options));
}

Bytes Filler::excess(const Placement& placement, const schedule::Options& options) const {
  const memory::Ledger sums = ledger(placement, options);
  const auto above = [](Bytes needed, Bytes budget) {
    return needed > budget ? needed - budget : 0;
  };
  return above(sums.total(Tier::device), budgets_.device) +
         above(sums.total(Tier::host), budgets_.host);
}

std::vector<std::size_t> Filler::movable(const Placement& placement, const Move& move) const {
  std::vector<std::size_t> blocks;
  for (std::size_t b = 0; b < constraints_.size(); ++b) {
    const PlacementConstraint& constraint = constraints_[b];
    const BlockPlacement& now = placement.blocks[b];
    bool open = true;
    if (takes_weights(move.kind)) open = open && !constraint.weights && now.weights > move.tier;
    if (takes_optimizer(move.kind))
      open = open && !constraint.optimizer && now.optimizer > move.tier;
    if (move.kind == Movable::activations)
      open = !constraint.activations && now.activations > move.tier;
    if (move.kind == Movable::intermediates) {
      const bool layer = schedule::is_layer(b, constraints_.size());
      open = layer && !constraint.recompute && !now.keeps_intermediates;
    }
    if (open) blocks.push_back(b);
  }
  return blocks;
}

/// The number of blocks to move with the least excess, for a start that does not fit.
std::size_t Filler::least_excess(const Placement& placement, const Move& move,
                                 const std::vector<std::size_t>& blocks, std::size_t most,
                                 const schedule::Options& options) const {
  constexpr std::size_t kTries = 4;
  std::size_t best = 0;
  Bytes least = excess(placement, options);
  const std::size_t stride = std::max<std::size_t>(1, most / kTries);
  for (std::size_t count = stride; count <= most; count += stride) {
    const Bytes above = excess(moved_to(placement, move, blocks, count), options);
    if (above > least || (above == least && above > 0)) continue;
    least = above;
    best = count;
  }
  return best;
}

std::size_t Filler::apply(Placement& placement, const Move& move,
                          const schedule::Options& options) const {
  const std::vector<std::size_t> blocks = movable(placement, move);
  const std::size_t most = std::min(move.limit, blocks.size());
  if (most == 0) return 0;
  const auto fits = [&](std::size_t count) {
    return excess(moved_to(placement, move, blocks, count), options) == 0;
  };
  std::size_t count = most;
  // Try all blocks first: moving all of them may save a staging buffer.
  if (!fits(most)) {
    if (excess(placement, options) > 0) {
      count = least_excess(placement, move, blocks, most, options);
    } else {
      std::size_t too_many = most;
      count = 0;
      while (too_many - count > 1) {
        const std::size_t middle = count + (too_many - count) / 2;
        (fits(middle) ? count : too_many) = middle;
      }
    }
  }
  placement = moved_to(std::move(placement), move, blocks, count);
  return count;
}

Placement Filler::fill(const Program& program, const schedule::Options& options,
                       std::vector<std::size_t>* moved) const {
  Placement placement = lowest();
  if (moved != nullptr) moved->clear();
  for (const Move& move : program) {
    const std::size_t count = apply(placement, move, options);
    if (moved != nullptr) moved->push_back(count);
  }
  return placement;
}

}  // namespace ballast::planning
