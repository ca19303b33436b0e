#include "src/planner/filling.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"

namespace ballast::planner {

std::vector<PlacementConstraint> read_constraints(const engine::Constraints& constraints,
                                                  std::size_t blocks) {
  std::vector<PlacementConstraint> found(blocks, constraints.placement);
  for (const step::PlacementRule& rule : constraints.rules) {
    if (rule.last_block >= blocks) {
      throw Error(ErrorCategory::config,
                  fmt::format("ballast.placement: block {} does not exist; the model has blocks 0 "
                              "to {}",
                              rule.last_block, blocks - 1));
    }
    for (std::uint64_t b = rule.first_block; b <= rule.last_block; ++b) {
      if (rule.weights) found[b].weights = rule.weights;
      if (rule.optimizer) found[b].optimizer = rule.optimizer;
      if (rule.activations) found[b].activations = rule.activations;
      if (rule.gradients) found[b].gradients = rule.gradients;
      if (rule.kept) found[b].kept = rule.kept;
    }
  }
  return found;
}

namespace {

using step::BlockPlacement;
using step::Placement;

bool takes_weights(TensorClass kind) {
  return kind == TensorClass::weights || kind == TensorClass::both;
}

bool takes_optimizer(TensorClass kind) {
  return kind == TensorClass::optimizer || kind == TensorClass::both;
}

std::string describe_move(const PlacementStep& step) {
  return fmt::format(", {} {} {} {}", static_cast<int>(step.kind), static_cast<int>(step.tier),
                     static_cast<int>(step.order), step.limit);
}

bool keeps(TensorClass kind) {
  return kind == TensorClass::intermediates || kind == TensorClass::logits;
}

std::vector<std::size_t> chosen(const std::vector<std::size_t>& blocks, std::size_t count,
                                BlockOrder order) {
  const std::size_t n = blocks.size();
  std::vector<std::size_t> out;
  out.reserve(count);
  for (std::size_t i = 0; i < n; ++i) {
    const bool taken = order == BlockOrder::first  ? i < count
                       : order == BlockOrder::last ? i >= n - count
                                                   : (i + 1) * count / n > i * count / n;
    if (taken) out.push_back(blocks[i]);
  }
  return out;
}

Placement moved_to(Placement placement, const PlacementStep& step,
                   const std::vector<std::size_t>& blocks, std::size_t count) {
  for (const std::size_t b : chosen(blocks, count, step.order)) {
    BlockPlacement& block = placement.blocks[b];
    if (takes_weights(step.kind)) block.weights = step.tier;
    if (takes_optimizer(step.kind)) block.optimizer = step.tier;
    if (step.kind == TensorClass::activations) block.activations = step.tier;
    if (step.kind == TensorClass::gradients) block.gradients = step.tier;
    if (keeps(step.kind)) block.kept = step::Kept::all;
    if (step.kind == TensorClass::attention) block.kept = step::Kept::attention;
  }
  return placement;
}

}  // namespace

std::string describe(const step::Options& options) {
  const step::BufferCounts& buffers = options.buffers;
  return fmt::format("{} {} {} {} {} {} {}", static_cast<int>(options.order), buffers.weight_slots,
                     buffers.gradient_slots, buffers.weight_staging, buffers.state_staging,
                     buffers.activation_staging, buffers.gradient_staging);
}

bool swaps_gradients(const PlacementRecipe& recipe) {
  return std::any_of(recipe.begin(), recipe.end(),
                     [](const PlacementStep& step) { return step.kind == TensorClass::gradients; });
}

Placement with_speculation(Placement placement, std::size_t count) {
  std::vector<std::size_t> below;
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    placement.blocks[b].speculates = false;
    if (placement.blocks[b].optimizer != Tier::device) below.push_back(b);
  }
  for (const std::size_t b : chosen(below, std::min(count, below.size()), BlockOrder::spread)) {
    placement.blocks[b].speculates = true;
  }
  return placement;
}

step::Kept TierFiller::kept_by_default(std::size_t block) const {
  const step::Kept kept = constraints_[block].kept.value_or(step::Kept::nothing);
  const bool may = kept == step::Kept::attention ? problem_.index->keeps_attention(block)
                                                 : problem_.index->may_keep(block);
  return may ? kept : step::Kept::nothing;
}

Placement TierFiller::uniform(Tier weights, Tier optimizer, Tier activations,
                              Tier gradients) const {
  Placement placement;
  placement.blocks.reserve(constraints_.size());
  for (std::size_t b = 0; b < constraints_.size(); ++b) {
    const PlacementConstraint& constraint = constraints_[b];
    // The embedding has no input; the head consumes its input immediately; without a backward pass
    // inputs are not kept.
    const bool places = problem_.index->places_input(b);
    placement.blocks.push_back(
        {constraint.weights.value_or(weights),
         has_states(b) ? constraint.optimizer.value_or(optimizer) : Tier::device,
         constraint.activations.value_or(places ? activations : Tier::device), kept_by_default(b),
         false, constraint.gradients.value_or(gradients)});
  }
  return placement;
}

bool TierFiller::is_table(std::size_t block) const {
  return problem_.program().blocks[block].selected > 0;
}

Placement TierFiller::with_tables_below(Placement placement, const step::Options& options) const {
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    BlockPlacement& block = placement.blocks[b];
    if (!is_table(b)) continue;
    block.weights = std::max(block.weights, Tier::host);
    const bool updates = options.purpose == step::Purpose::training && has_states(b);
    if (updates) block.optimizer = std::max(block.optimizer, Tier::host);
  }
  return placement;
}

memory::Ledger TierFiller::ledger(const Placement& placement, const step::Options& options) const {
  if (speculating_ == 0)
    return engine::make_ledger(step::sum_buffers(problem_, placement, options));
  return engine::make_ledger(
      step::sum_buffers(problem_, with_speculation(placement, speculating_), options));
}

Bytes TierFiller::excess(const Placement& placement, const step::Options& options) const {
  return ledger(placement, options).excess(budgets_);
}

TierFiller::Headroom TierFiller::fit(const Placement& placement,
                                     const step::Options& options) const {
  const memory::Ledger sums = ledger(placement, options);
  const auto left = [&](Tier tier, Bytes budget) {
    return static_cast<std::int64_t>(budget) - static_cast<std::int64_t>(sums.needed(tier));
  };
  return {std::min(left(Tier::device, budgets_.device), left(Tier::host, budgets_.host)),
          sums.excess(budgets_)};
}

/// Searches between `most` blocks, which exceed a budget by `lacking`, and none, which leave the
/// room of `now`. Memory grows nearly in proportion to the number of blocks, so it interpolates,
/// and halves every second time.
std::size_t TierFiller::max_that_fit(const Placement& placement, const PlacementStep& step,
                                     const std::vector<std::size_t>& blocks, std::size_t most,
                                     Headroom& now, std::int64_t lacking,
                                     const step::Options& options) const {
  std::size_t fits = 0;
  std::size_t too_many = most;
  for (bool halves = false; too_many - fits > 1; halves = !halves) {
    const std::size_t between = too_many - fits;
    const auto left = static_cast<double>(now.room);
    const double part = halves ? 0.5 : left / (left + static_cast<double>(lacking));
    const auto guess = static_cast<std::size_t>(part * static_cast<double>(between));
    const std::size_t count = fits + std::clamp<std::size_t>(guess, 1, between - 1);
    const Headroom here = fit(moved_to(placement, step, blocks, count), options);
    if (here.room >= 0) {
      fits = count;
      now = here;
    } else {
      too_many = count;
      lacking = -here.room;
    }
  }
  return fits;
}

bool TierFiller::is_open(std::size_t block, TensorClass kind) const {
  const PlacementConstraint& constraint = constraints_[block];
  if (kind == TensorClass::activations)
    return problem_.index->places_input(block) && !constraint.activations;
  if (kind == TensorClass::gradients) return has_states(block) && !constraint.gradients;
  if (kind == TensorClass::intermediates) {
    return problem_.index->keeps_intermediates(block) && !constraint.kept;
  }
  if (kind == TensorClass::logits) {
    return problem_.index->keeps_logits(block) && !constraint.kept;
  }
  if (kind == TensorClass::attention) {
    return problem_.index->keeps_attention(block) && !constraint.kept;
  }
  return (!takes_weights(kind) || !constraint.weights) &&
         (!takes_optimizer(kind) || (has_states(block) && !constraint.optimizer));
}

bool TierFiller::is_open(std::size_t block, const PlacementStep& step) const {
  const bool moves = takes_weights(step.kind) || takes_optimizer(step.kind);
  if (moves && step.tier == Tier::device && is_table(block)) return false;
  return is_open(block, step.kind);
}

std::vector<std::size_t> TierFiller::blocks_to_place(const Placement& placement,
                                                     const PlacementStep& step) const {
  std::vector<std::size_t> blocks;
  for (std::size_t b = 0; b < constraints_.size(); ++b) {
    const BlockPlacement& now = placement.blocks[b];
    bool slower = true;
    if (takes_weights(step.kind)) slower = slower && now.weights > step.tier;
    if (takes_optimizer(step.kind)) slower = slower && now.optimizer > step.tier;
    if (step.kind == TensorClass::activations) slower = now.activations > step.tier;
    if (step.kind == TensorClass::gradients) {
      slower = now.gradients > step.tier && now.optimizer != Tier::device;
    }
    if (keeps(step.kind)) slower = now.kept != step::Kept::all;
    if (step.kind == TensorClass::attention) slower = now.kept == step::Kept::nothing;
    if (!slower || !is_open(b, step)) continue;
    if (step.kind == TensorClass::logits &&
        !step::in_one_pass(problem_, moved_to(placement, step, {b}, 1))) {
      continue;
    }
    blocks.push_back(b);
  }
  return blocks;
}

/// Returns the number of blocks with the least excess, if even the start does not fit. `all`: with
/// `most` blocks.
std::size_t TierFiller::min_excess(const Placement& placement, const PlacementStep& step,
                                   const std::vector<std::size_t>& blocks, std::size_t most,
                                   Headroom& now, const Headroom& all,
                                   const step::Options& options) const {
  constexpr std::size_t kTries = 4;
  std::size_t best = 0;
  const std::size_t stride = std::max<std::size_t>(1, most / kTries);
  for (std::size_t count = stride; count <= most; count += stride) {
    const Headroom here =
        count == most ? all : fit(moved_to(placement, step, blocks, count), options);
    if (here.excess > now.excess || (here.excess == now.excess && here.excess > 0)) continue;
    now = here;
    best = count;
  }
  return best;
}

Bytes TierFiller::descend(Placement& placement, const step::Options& options) const {
  // All runs of blocks in a small model; all blocks, halves and so on in a larger one.
  constexpr std::size_t kSmall = 8;
  const std::size_t blocks = constraints_.size();
  // Approximate number of buffers listed for ledgers.
  constexpr std::size_t kBufferLevels = 300'000;
  std::size_t tries = kBufferLevels / (blocks * 10);
  // Among equal excesses, the one with less memory in total is better, because it leaves room for
  // the next change.
  const auto cost = [&](const Placement& candidate) {
    const memory::Ledger sums = ledger(candidate, options);
    return std::pair(sums.excess(budgets_), sums.total(Tier::device) + sums.total(Tier::host));
  };
  auto least = cost(placement);
  const auto attempt = [&](const PlacementStep& step, std::size_t first, std::size_t count) {
    if (tries == 0 || least.first == 0) return;
    std::vector<std::size_t> open;
    for (std::size_t b = first; b < first + count; ++b) {
      if (is_open(b, step)) open.push_back(b);
    }
    Placement other = moved_to(placement, step, open, open.size());
    if (other.blocks == placement.blocks) return;
    --tries;
    const auto needed = cost(other);
    if (needed >= least) return;
    least = needed;
    placement = std::move(other);
  };
  auto before = least;
  do {
    before = least;
    for (std::size_t count = blocks; count > 0; count -= blocks > kSmall ? (count + 1) / 2 : 1) {
      const std::size_t stride = blocks > kSmall ? count : 1;
      for (std::size_t first = 0; first + count <= blocks; first += stride) {
        for (const TensorClass kind : {TensorClass::weights, TensorClass::optimizer,
                                       TensorClass::both, TensorClass::activations}) {
          for (const Tier tier : kTiers) attempt({kind, tier}, first, count);
        }
      }
    }
  } while (least < before);
  return least.first;
}

/// Returns the best of all placements; empty if there are too many.
std::optional<Placement> TierFiller::best_of_all(const step::Options& options,
                                                 Tier gradients) const {
  constexpr std::size_t kFew = 8;  // 3^8 placements
  std::vector<std::pair<std::size_t, Tier BlockPlacement::*>> open;
  for (std::size_t b = 0; b < constraints_.size(); ++b) {
    if (is_open(b, TensorClass::weights)) open.emplace_back(b, &BlockPlacement::weights);
    if (is_open(b, TensorClass::optimizer)) open.emplace_back(b, &BlockPlacement::optimizer);
    if (is_open(b, TensorClass::activations)) open.emplace_back(b, &BlockPlacement::activations);
  }
  if (open.size() > kFew) return std::nullopt;
  Placement placement =
      with_tables_below(uniform(Tier::device, Tier::device, Tier::device, gradients), options);
  Placement best = placement;
  Bytes least = excess(placement, options);
  for (std::size_t i = 0; i < open.size() && least > 0;) {
    Tier& tier = placement.blocks[open[i].first].*open[i].second;
    const bool last = tier == kTiers.back();
    tier = last ? kTiers.front() : kTiers.at(static_cast<std::size_t>(tier) + 1);
    if (last) placement = with_tables_below(std::move(placement), options);
    i = last ? i + 1 : 0;
    if (last) continue;
    const Bytes above = excess(placement, options);
    if (above >= least) continue;
    least = above;
    best = placement;
  }
  return best;
}

Placement TierFiller::nearest(const step::Options& options, Tier gradients) const {
  const std::string question = describe(options) + std::string(to_string(gradients));
  if (std::optional<Placement> known = nearest_.find(question)) return *std::move(known);
  Placement found = find_nearest(options, gradients);
  nearest_.add(question, found);
  return found;
}

Placement TierFiller::find_nearest(const step::Options& options, Tier gradients) const {
  if (std::optional<Placement> best = best_of_all(options, gradients)) return *std::move(best);
  constexpr std::size_t kStarts = 3;
  std::vector<std::pair<Bytes, Placement>> starts;
  for (const Tier weights : kTiers) {
    for (const Tier optimizer : kTiers) {
      for (const Tier activations : kTiers) {
        Placement start =
            with_tables_below(uniform(weights, optimizer, activations, gradients), options);
        const auto equal = [&](const auto& other) { return other.second.blocks == start.blocks; };
        if (std::any_of(starts.begin(), starts.end(), equal)) continue;
        const Bytes above = excess(start, options);
        starts.emplace_back(above, std::move(start));
      }
    }
  }
  const auto by_excess = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(starts.begin(), starts.end(), by_excess);
  starts.resize(std::min(starts.size(), kStarts));
  for (auto& [above, placement] : starts) {
    above = descend(placement, options);
    if (above == 0) return placement;
  }
  return std::min_element(starts.begin(), starts.end(), by_excess)->second;
}

std::size_t TierFiller::count_to_place(const Placement& placement, const PlacementStep& step,
                                       const std::vector<std::size_t>& blocks, std::size_t most,
                                       std::optional<Headroom>& now,
                                       const step::Options& options) const {
  // All blocks are tried first, because moving all may save a staging buffer.
  const Headroom all = fit(moved_to(placement, step, blocks, most), options);
  if (all.room >= 0) {
    now = all;
    return most;
  }
  if (!now) now = fit(placement, options);
  if (now->room < 0) return min_excess(placement, step, blocks, most, *now, all, options);
  return max_that_fit(placement, step, blocks, most, *now, -all.room, options);
}

std::size_t TierFiller::apply(Placement& placement, const PlacementStep& step,
                              const step::Options& options, bool swapping, const std::string& moves,
                              std::optional<Headroom>& now) const {
  if (step.kind == TensorClass::all) {
    placement = nearest(options, swapping ? Tier::nvme : Tier::host);
    now.reset();
    return 0;
  }
  const std::vector<std::size_t> blocks = blocks_to_place(placement, step);
  const std::size_t most = std::min(step.limit, blocks.size());
  if (most == 0) return 0;
  std::optional<std::size_t> count = counts_.find(moves);
  if (count) {
    now.reset();
  } else {
    count = count_to_place(placement, step, blocks, most, now, options);
    counts_.add(moves, *count);
  }
  placement = moved_to(std::move(placement), step, blocks, *count);
  return *count;
}

Placement TierFiller::fill(const PlacementRecipe& recipe, const step::Options& options,
                           std::vector<std::size_t>* moved) const {
  const bool swapping = swaps_gradients(recipe);
  Placement placement = with_tables_below(
      uniform(Tier::nvme, Tier::nvme, Tier::nvme, swapping ? Tier::nvme : Tier::host), options);
  if (moved != nullptr) moved->clear();
  std::string moves = describe(options) + (swapping ? "swapping" : "");
  std::optional<Headroom> now;
  for (const PlacementStep& step : recipe) {
    moves += describe_move(step);
    const std::size_t count = apply(placement, step, options, swapping, moves, now);
    if (moved != nullptr) moved->push_back(count);
  }
  // This has no effect, but equal blocks are then described together.
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    BlockPlacement& block = placement.blocks[b];
    if (block.optimizer == Tier::device) block.gradients = Tier::host;
    if (problem_.program().is_layer(b) && !problem_.index->places_input(b) &&
        !constraints_[b].activations) {
      block.activations = placement.blocks[b - 1].activations;
    }
  }
  return with_speculation(std::move(placement), speculating_);
}

}  // namespace ballast::planner
