#include "src/planner/search.h"

#include <algorithm>
#include <array>
#include <exception>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/threads.h"

namespace ballast::planner {
namespace {

/// Points that are simulated even beyond the work limit.
constexpr std::size_t kFewestSimulated = 8;
/// Number of recipes that every micro-batch size tries.
constexpr std::size_t kProbation = 4;
/// Speculation makes clipped steps slower, so it must gain something in the others.
constexpr double kWorthSpeculating = 1.02;

/// Lower bound on the number of a step's operations, before it is built.
std::size_t min_operations(const PlanRequest& request, std::uint64_t micro_batch) {
  const std::uint64_t share = request.run.batch.train_batch / request.mesh.data;
  return 2 * request.run.model.blocks.size() * (share / micro_batch);
}

}  // namespace

std::vector<std::uint64_t> micro_batch_sizes(const PlanRequest& request) {
  const engine::BatchRule& batch = request.run.batch;
  if (batch.train_batch == 0 || batch.train_batch % request.mesh.data != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("train_batch_size: {} sequences cannot be shared equally by {} ranks",
                            batch.train_batch, request.mesh.data));
  }
  const std::uint64_t share = batch.train_batch / request.mesh.data;
  if (!batch.automatic) {
    const std::uint64_t size = batch.samples();
    if (size == 0 || size * batch.accumulation != share) {
      throw Error(ErrorCategory::config,
                  fmt::format("train_batch_size: {} is not train_micro_batch_size_per_gpu {} x "
                              "gradient_accumulation_steps {} x {} ranks",
                              batch.train_batch, size, batch.accumulation, request.mesh.data));
    }
    return {size};
  }
  const auto order = request.run.constraints.order.value_or(step::Order::layer_major);
  // One micro-batch suits every order.
  if (order != step::Order::layer_major && request.run.has_losses_of_step()) return {share};
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t d = 1; d * d <= share; ++d) {
    if (share % d != 0) continue;
    sizes.push_back(d);
    if (d * d != share) sizes.push_back(share / d);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  return sizes;
}

std::vector<PlacementRecipe> basic_recipes() {
  const auto step = [](TensorClass kind, Tier tier, BlockOrder order = BlockOrder::first) {
    // The backward pass needs the activations of the last blocks first.
    const bool of_activations =
        kind == TensorClass::activations || kind == TensorClass::intermediates;
    return PlacementStep{kind, tier, of_activations ? BlockOrder::last : order};
  };
  const auto in_order = [&](std::initializer_list<TensorClass> kinds, Tier tier,
                            BlockOrder order = BlockOrder::first) {
    PlacementRecipe recipe;
    for (const TensorClass kind : kinds) recipe.push_back(step(kind, tier, order));
    return recipe;
  };
  using enum TensorClass;
  const std::array<PlacementRecipe, 8> device = {
      in_order({activations, weights, both, optimizer, logits, intermediates}, Tier::device),
      in_order({activations, intermediates, weights, both, optimizer, logits}, Tier::device),
      in_order({activations, both, weights, optimizer, logits, intermediates}, Tier::device),
      in_order({both, activations, weights, optimizer, logits, intermediates}, Tier::device),
      in_order({activations}, Tier::device),
      in_order({intermediates, activations, weights, both, logits}, Tier::device),
      in_order({weights, logits, activations, both, optimizer, intermediates}, Tier::device),
      in_order({}, Tier::device)};
  const std::array<PlacementRecipe, 6> host = {
      in_order({weights, optimizer, activations}, Tier::host),
      in_order({optimizer, weights, activations}, Tier::host),
      in_order({activations, weights, optimizer}, Tier::host),
      in_order({weights, optimizer, activations}, Tier::host, BlockOrder::spread),
      in_order({both, weights, optimizer, activations}, Tier::host),
      in_order({optimizer, weights, activations}, Tier::host, BlockOrder::spread)};
  std::vector<PlacementRecipe> recipes;
  recipes.reserve(device.size() * host.size());
  // In diagonal order, combinations of the most promising recipes come first.
  for (std::size_t sum = 0; sum + 1 < device.size() + host.size(); ++sum) {
    for (std::size_t d = 0; d <= std::min(sum, device.size() - 1); ++d) {
      if (sum - d < host.size()) recipes.push_back(concatenate(device.at(d), host.at(sum - d)));
    }
  }
  return recipes;
}

PlanSearch::PlanSearch(const PlanRequest& request)
    : request_(request), threads_(search_threads(request)), sizes_(micro_batch_sizes(request)) {}

BatchChoice& PlanSearch::choice_of(std::uint64_t micro_batch) {
  std::unique_ptr<BatchChoice>& choice = choices_[micro_batch];
  if (!choice) choice = std::make_unique<BatchChoice>(request_, micro_batch);
  return *choice;
}

std::optional<Candidate> PlanSearch::run() {
  for (const bool last : {false, true}) {
    if (last && last_orders(request_.run).empty()) break;
    for (const bool swaps : {false, true}) {
      if (swaps && !opens_gradients(request_.run)) break;
      const auto recipes = swaps ? with_swapped_gradients(basic_recipes()) : basic_recipes();
      for (const BufferLevel number : kBufferLevels) {
        if (candidates_.empty()) try_recipes(recipes, number, last);
      }
    }
  }
  if (candidates_.empty()) try_closest_miss();
  if (candidates_.empty() && lacking_) throw Error(*lacking_);
  if (candidates_.empty()) return std::nullopt;
  refine();
  keep_attention(Candidate(*best()));
  prefetch_experts(Candidate(*best()));
  speculate(Candidate(*best()));
  return *best();
}

void PlanSearch::try_recipes(const std::vector<PlacementRecipe>& recipes, BufferLevel number,
                             bool with_last_orders) {
  std::vector<SearchPoint> pending;
  std::vector<std::size_t> recipe_of;  // by pending point
  const auto try_pending = [&] {
    bool left_out = false;
    attempt(pending, [&](std::size_t i) {
      const BatchChoice& choice = *pending[i].choice;
      // The orders of a recipe are tried together.
      const bool same =
          i > 0 && pending[i - 1].choice == &choice && recipe_of[i - 1] == recipe_of[i];
      if (!same) left_out = out_of_work() || is_hopeless(choice.micro_batch, recipe_of[i]);
      return left_out;
    });
    pending.clear();
    recipe_of.clear();
  };
  for (std::size_t p = 0; p < recipes.size(); ++p) {
    for (const std::uint64_t size : sizes_) {
      const auto is_of_size = [&](const SearchPoint& point) {
        return point.choice->micro_batch == size;
      };
      // A pending trial may show that the size is not hopeless.
      if (is_hopeless(size, p) && std::ranges::any_of(pending, is_of_size)) try_pending();
      if (out_of_work()) return;
      if (is_hopeless(size, p)) continue;
      BatchChoice& choice = choice_of(size);
      step::Options options = with_buffers(request_.run, choice.outline.options, number);
      for (const step::Order order :
           with_last_orders ? last_orders(request_.run) : orders(request_.run, options)) {
        options.order = order;
        pending.push_back({&choice, options, recipes[p]});
        recipe_of.push_back(p);
      }
      if (pending.size() >= threads_) try_pending();
    }
  }
  try_pending();
}

/// Returns whether the search leaves out this recipe for a micro-batch size, after what other
/// recipes have reached.
bool PlanSearch::is_hopeless(std::uint64_t micro_batch, std::size_t recipe) const {
  constexpr std::size_t kGivenUp = 12;
  constexpr double kHopeless = 0.9;
  // A large number of very small micro-batches is tried only if nothing else fits.
  if (!candidates_.empty() && min_operations(request_, micro_batch) > request_.work_limit / 16) {
    return true;
  }
  const auto choice = choices_.find(micro_batch);
  const double best = choice == choices_.end() ? 0.0 : choice->second->best;
  if (recipe >= kProbation && best < kHopeless * best_tokens_per_second_) return true;
  return recipe >= kGivenUp && best == 0.0;
}

void PlanSearch::try_closest_miss() {
  const ClosestMiss nearest = find_closest_miss(request_, Effort::thorough);
  if (nearest.excess > 0) return;
  BatchChoice& choice = choice_of(nearest.micro_batch);
  std::vector<PlacementRecipe> recipes = basic_recipes();
  recipes.resize(kProbation);
  std::vector<SearchPoint> points;
  points.reserve(recipes.size());
  for (const PlacementRecipe& recipe : recipes) {
    points.push_back({&choice, nearest.options, concatenate(nearest.recipe, recipe)});
  }
  attempt(points);
}

void PlanSearch::refine() {
  constexpr std::size_t kRounds = 6;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const double before = best_tokens_per_second_;
    const Candidate* const center = best();
    std::vector<SearchPoint> points;
    vary_buffers(*center, points);
    vary_recipe(*center, points);
    attempt(points, [&](std::size_t) { return out_of_work(); });
    if (out_of_work()) return;
    if (best_tokens_per_second_ <= before * 1.001) return;
  }
}

void PlanSearch::vary_buffers(const Candidate& candidate, std::vector<SearchPoint>& points) const {
  using step::BufferCounts;
  const BufferCounts& named = request_.run.constraints.buffers;
  for (const std::uint32_t count : {2U, 4U, 6U, 1U}) {
    const auto with = [&](auto... members) {
      if (((named.*members > 0) || ...)) return;
      SearchPoint point = candidate.point;
      ((point.options.buffers.*members = count), ...);
      points.push_back(std::move(point));
    };
    with(&BufferCounts::state_staging);
    with(&BufferCounts::weight_staging);
    with(&BufferCounts::state_staging, &BufferCounts::weight_staging);
    with(&BufferCounts::weight_slots);
    if (count < 4) with(&BufferCounts::gradient_slots);
    with(&BufferCounts::activation_staging);
    with(&BufferCounts::gradient_staging);
  }
}

void PlanSearch::vary_recipe(const Candidate& candidate, std::vector<SearchPoint>& points) const {
  const PlacementRecipe& recipe = candidate.point.recipe;
  for (std::size_t i = 0; i < recipe.size(); ++i) {
    const std::size_t count = candidate.moved[i];
    if (count == 0) continue;
    std::set<std::size_t> limits = {0, count / 2, count * 3 / 4, count - 1};
    if (count > 2) limits.insert(count - 2);
    if (count > 4) limits.insert(count - 4);
    for (const std::size_t limit : limits) {
      if (limit == count) continue;
      SearchPoint point = candidate.point;
      point.recipe[i].limit = limit;
      points.push_back(std::move(point));
    }
    for (const BlockOrder order : {BlockOrder::first, BlockOrder::last, BlockOrder::spread}) {
      if (order == recipe[i].order) continue;
      SearchPoint point = candidate.point;
      point.recipe[i].order = order;
      points.push_back(std::move(point));
    }
  }
}

/// Tries to keep attention of layers that the best plan recomputes: in the memory that it leaves,
/// in that of whole intermediates, in that of states and weights, and on the host with the
/// activations.
void PlanSearch::keep_attention(const Candidate& plan) {
  const std::vector<PlacementConstraint>& constraints = plan.point.choice->constraints;
  const step::ProgramIndex& index = *plan.point.choice->outline.problem.index;
  const auto is_open = [&](std::size_t b) {
    return index.keeps_attention(b) && !constraints[b].kept &&
           plan.placement.blocks[b].kept == step::Kept::nothing;
  };
  bool open = false;
  for (std::size_t b = 0; b < constraints.size(); ++b) open = open || is_open(b);
  if (!open) return;
  const PlacementStep keeping = {
      .kind = TensorClass::attention, .tier = Tier::device, .order = BlockOrder::last};
  const PlacementRecipe& recipe = plan.point.recipe;
  const auto whole = std::find_if(recipe.begin(), recipe.end(), [](const PlacementStep& step) {
    return step.kind == TensorClass::intermediates;
  });
  const auto keep_before = [&](PlacementRecipe::const_iterator step) {
    SearchPoint point = plan.point;
    point.recipe.insert(point.recipe.begin() + (step - recipe.begin()), keeping);
    return point;
  };
  std::vector<SearchPoint> points = {keep_before(recipe.end()), keep_before(whole),
                                     keep_before(recipe.begin())};
  SearchPoint first = points.back();
  for (PlacementStep& step : first.recipe) {
    if (step.kind == TensorClass::activations && step.tier == Tier::device) step.limit = 0;
  }
  points.push_back(std::move(first));
  attempt(points);
}

/// Moves weights of experts before their router has chosen, if that makes the best plan faster.
void PlanSearch::prefetch_experts(Candidate plan) {
  const step::Problem& problem = plan.point.choice->outline.problem;
  if (problem.index->routing_bytes() == 0 || request_.run.constraints.expert_prefetch) return;
  plan.point.options.prefetches_experts = true;
  const plan::Schedule schedule =
      step::build_steady_step(problem, plan.placement, plan.point.options);
  measure(request_, schedule, plan);
  count_simulation(schedule.steady.operations.size());
  record(std::move(plan));
}

/// Lets blocks of the best plan speculate in the memory that it leaves: first in coarse steps, then
/// with numbers around the best.
void PlanSearch::speculate(const Candidate& plan) {
  const engine::RunInputs& run = request_.run;
  if (run.constraints.speculative_updates || run.options.update != step::Update::gated) return;
  const std::size_t most = max_speculating(plan);
  constexpr std::size_t kParts = 4;
  std::size_t count = 0;
  Candidate best = plan;
  best.tokens_per_second *= kWorthSpeculating;
  const auto attempt = [&](const std::vector<std::size_t>& counts) {
    for (auto& [blocks, candidate] : speculating(plan, counts)) {
      if (candidate.tokens_per_second <= best.tokens_per_second) continue;
      best = std::move(candidate);
      count = blocks;
    }
  };
  std::vector<std::size_t> coarse;
  for (std::size_t part = kParts; part > 0 && most > 0; --part) {
    coarse.push_back((most * part + kParts - 1) / kParts);
  }
  attempt(coarse);
  if (count == 0) return;
  for (const std::size_t step : {most / (2 * kParts), most / (4 * kParts)}) {
    if (step == 0 || count <= step) continue;
    std::vector<std::size_t> counts = {count + step, count - step};
    std::erase_if(counts, [most](std::size_t blocks) { return blocks > most; });
    attempt(counts);
  }
  record(std::move(best));
}

/// Returns the largest number of speculating blocks whose old values fit in addition to `plan`.
std::size_t PlanSearch::max_speculating(const Candidate& plan) const {
  const BatchChoice& choice = *plan.point.choice;
  const Bytes drives = request_.rates.nvme_bytes;
  const auto fits = [&](std::size_t count) {
    const memory::Ledger ledger = engine::make_ledger(step::sum_buffers(
        choice.outline.problem, with_speculation(plan.placement, count), plan.point.options));
    return ledger.fits(choice.budgets) && (drives == 0 || ledger.total(Tier::nvme) <= drives);
  };
  const auto& blocks = plan.placement.blocks;
  auto too_many = 1 + static_cast<std::size_t>(std::count_if(
                          blocks.begin(), blocks.end(), [](const step::BlockPlacement& block) {
                            return block.optimizer != Tier::device;
                          }));
  std::size_t most = 0;
  while (too_many - most > 1) {
    const std::size_t middle = most + (too_many - most) / 2;
    (fits(middle) ? most : too_many) = middle;
  }
  return most;
}

/// Returns `plan` with each of these numbers of speculating blocks, simulated.
std::vector<std::pair<std::size_t, Candidate>> PlanSearch::speculating(
    const Candidate& plan, const std::vector<std::size_t>& counts) {
  const step::Problem& problem = plan.point.choice->outline.problem;
  std::vector<std::pair<std::size_t, Candidate>> candidates;
  candidates.reserve(counts.size());
  for (const std::size_t count : counts) candidates.emplace_back(count, plan);
  std::vector<std::size_t> operations(counts.size());
  run_in_parallel(counts.size(), threads_, [&](std::size_t i) {
    auto& [count, candidate] = candidates[i];
    candidate.placement = with_speculation(plan.placement, count);
    const plan::Schedule schedule =
        step::build_steady_step(problem, candidate.placement, plan.point.options);
    measure(request_, schedule, candidate);
    operations[i] = schedule.steady.operations.size();
  });
  for (const std::size_t count : operations) count_simulation(count);
  return candidates;
}

bool PlanSearch::out_of_work() const {
  return work_ > request_.work_limit && simulated_ >= kFewestSimulated;
}

void PlanSearch::attempt(std::span<const SearchPoint> points,
                         const std::function<bool(std::size_t)>& leaves_out) {
  std::size_t next = 0;
  while (next < points.size()) {
    if (leaves_out && leaves_out(next)) {
      ++next;
      continue;
    }
    const std::size_t end = std::min(points.size(), next + threads_);
    std::vector<Trial> trials = try_points(request_, threads_, points.subspan(next, end - next),
                                           seen_, best_tokens_per_second_);
    for (Trial& trial : trials) {
      if (!leaves_out || !leaves_out(next)) judge(std::move(trial));
      ++next;
    }
  }
}

/// Takes over the result of a trial, as if it had been computed now.
void PlanSearch::judge(Trial trial) {
  if (!trial.candidate) {
    if (trial.error) std::rethrow_exception(trial.error);
    return;
  }
  if (!seen_.insert(trial.key).second) return;
  constexpr std::size_t kPlansBuilt = 3;
  work_ += kPlansBuilt * trial.operations;
  if (trial.bound < kTie * best_tokens_per_second_) return;
  try {
    if (trial.error) std::rethrow_exception(trial.error);
  } catch (const Error& error) {
    // For example a machine without drives, which other plans may not need.
    if (error.category() != ErrorCategory::config) throw;
    if (!lacking_) lacking_ = error;
    return;
  }
  count_simulation(trial.operations);
  record(std::move(*trial.candidate));
}

void PlanSearch::count_simulation(std::size_t operations) {
  ++simulated_;
  work_ += (kScreening.warm_up + kScreening.measured) * operations;
}

void PlanSearch::record(Candidate candidate) {
  BatchChoice& choice = *candidate.point.choice;
  choice.best = std::max(choice.best, candidate.tokens_per_second);
  best_tokens_per_second_ = std::max(best_tokens_per_second_, candidate.tokens_per_second);
  candidates_.push_back(std::move(candidate));
}

/// Returns, among the candidates within 0.1% of the fastest, the one that writes least to NVMe,
/// then moves the fewest bytes, then uses the least memory, then was tried first.
const Candidate* PlanSearch::best() const {
  const Candidate* best = nullptr;
  const auto cost = [](const Candidate& candidate) {
    return std::tuple(candidate.written, candidate.moved_bytes, candidate.memory);
  };
  for (const Candidate& candidate : candidates_) {
    if (candidate.tokens_per_second < kTie * best_tokens_per_second_) continue;
    if (best == nullptr || cost(candidate) < cost(*best)) best = &candidate;
  }
  return best;
}

}  // namespace ballast::planner
