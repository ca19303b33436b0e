#include "src/planner/search.h"

#include <algorithm>
#include <array>
#include <tuple>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"

#include "src/planner/constraints.h"

namespace ballast::planner {
namespace {

using plan::Lane;

/// Points that are simulated even beyond the work limit.
constexpr std::size_t kFewestSimulated = 8;
constexpr plan::SimulationOptions kScreening = {.warm_up = 2, .measured = 2};
/// Number of recipes that every micro-batch size tries.
constexpr std::size_t kProbation = 4;
/// Plans within 0.1% of the fastest count as equally fast.
constexpr double kTie = 0.999;
/// Speculation makes clipped steps slower, so it must gain something in the others.
constexpr double kWorthSpeculating = 1.02;

/// Lower bound on the number of a step's operations, before it is built.
std::size_t min_operations(const BatchChoice& choice) {
  return 2 * choice.outline.model.blocks.size() * choice.outline.micro_batches;
}

/// Returns a key that is equal for points with the same schedule.
std::string key_of(std::uint64_t micro_batch, const step::Options& options,
                   const step::Placement& placement) {
  std::string key =
      fmt::format("{}/{}/{}/{}/{}/{}/{}/{}/", micro_batch, static_cast<int>(options.order),
                  options.buffers.weight_slots, options.buffers.gradient_slots,
                  options.buffers.weight_staging, options.buffers.state_staging,
                  options.buffers.activation_staging, options.buffers.gradient_staging);
  for (const auto& block : placement.blocks) {
    key += block.gradients == Tier::nvme ? 'g' : '.';
    key += static_cast<char>(
        '!' + 27 * static_cast<int>(block.kept) + 9 * static_cast<int>(block.weights) +
        3 * static_cast<int>(block.optimizer) + static_cast<int>(block.activations));
  }
  return key;
}

/// Returns the memory of the kernels for micro-batches of `size` sequences or pairs. A program
/// built without CUDA estimates it with the host device's kernels on one thread.
model::KernelSizes kernels_of(const PlanRequest& request, std::uint64_t size) {
  const config::Config& config = request.config;
  const model::MicroBatchShape shape =
      inputs::shape_of(config, size * config.data.sequences_per_sample());
  if (request.kernels) return request.kernels(shape);
  const bool on_host = request.rates.forward.empty()
                           ? device::shares_host_cores(inputs::device_options(config))
                           : request.rates.shared_cores > 0;
  return model::kernel_memory(request.model, config.type, shape,
                              on_host || !device::cuda_built_in() ? "host" : "cuda",
                              on_host ? config.ballast.compute_threads : 1);
}

}  // namespace

std::vector<std::uint64_t> micro_batch_sizes(const PlanRequest& request) {
  const config::BatchSection& batch = request.config.batch;
  if (batch.train_batch == 0 || batch.train_batch % request.mesh.data != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("train_batch_size: {} sequences cannot be shared equally by {} ranks",
                            batch.train_batch, request.mesh.data));
  }
  const std::uint64_t share = batch.train_batch / request.mesh.data;
  if (!batch.automatic) {
    if (batch.micro_batch == 0 || batch.micro_batch * batch.accumulation != share) {
      throw Error(
          ErrorCategory::config,
          fmt::format("train_batch_size: {} is not train_micro_batch_size_per_gpu {} x "
                      "gradient_accumulation_steps {} x {} ranks",
                      batch.train_batch, batch.micro_batch, batch.accumulation, request.mesh.data));
    }
    return {batch.micro_batch};
  }
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

BatchChoice::BatchChoice(const PlanRequest& request, std::uint64_t size)
    : micro_batch(size),
      budgets(request.budgets),
      outline(inputs::outline(with_micro_batches(request.config, size, request.mesh.data),
                              request.model, request.budgets, kernels_of(request, size),
                              request.mesh)),
      constraints(read_constraints(request.config, request.model.blocks.size())),
      filler(outline.problem, constraints, budgets, inputs::named_speculation(request.config)) {}

PlanSearch::PlanSearch(const PlanRequest& request) : request_(request) {
  for (const std::uint64_t size : micro_batch_sizes(request)) {
    choices_.push_back(std::make_unique<BatchChoice>(request, size));
  }
}

std::optional<Candidate> PlanSearch::run() {
  for (const bool swaps : {false, true}) {
    if (swaps && !opens_gradients(request_.config)) break;
    const auto recipes = swaps ? with_swapped_gradients(basic_recipes()) : basic_recipes();
    for (const BufferLevel number : kBufferLevels) {
      if (candidates_.empty()) try_recipes(recipes, number);
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

void PlanSearch::try_recipes(const std::vector<PlacementRecipe>& recipes, BufferLevel number) {
  constexpr std::size_t kGivenUp = 12;
  constexpr double kHopeless = 0.9;
  for (std::size_t p = 0; p < recipes.size(); ++p) {
    for (const auto& choice : choices_) {
      if (out_of_work()) return;
      // A large number of very small micro-batches is tried only if nothing else fits.
      if (!candidates_.empty() && min_operations(*choice) > request_.work_limit / 16) continue;
      if (p >= kProbation && choice->best < kHopeless * best_tokens_per_second_) continue;
      if (p >= kGivenUp && choice->best == 0.0) continue;
      step::Options options = with_buffers(request_.config, choice->outline.options, number);
      for (const step::Order order : orders(request_.config, options)) {
        options.order = order;
        attempt({choice.get(), options, recipes[p]});
      }
    }
  }
}

void PlanSearch::try_closest_miss() {
  const ClosestMiss nearest = find_closest_miss(request_, Effort::thorough);
  if (nearest.excess > 0) return;
  const auto choice = std::find_if(choices_.begin(), choices_.end(), [&](const auto& candidate) {
    return candidate->micro_batch == nearest.micro_batch;
  });
  std::vector<PlacementRecipe> recipes = basic_recipes();
  recipes.resize(kProbation);
  for (const PlacementRecipe& recipe : recipes) {
    attempt({choice->get(), nearest.options, concatenate(nearest.recipe, recipe)});
  }
}

void PlanSearch::refine() {
  constexpr std::size_t kRounds = 6;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const double before = best_tokens_per_second_;
    const Candidate* const center = best();
    std::vector<SearchPoint> points;
    vary_buffers(*center, points);
    vary_recipe(*center, points);
    for (const SearchPoint& point : points) {
      if (out_of_work()) return;
      attempt(point);
    }
    if (best_tokens_per_second_ <= before * 1.001) return;
  }
}

void PlanSearch::vary_buffers(const Candidate& candidate, std::vector<SearchPoint>& points) const {
  using step::BufferCounts;
  const BufferCounts& named = request_.config.buffers;
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
  const step::ProgramTable& table = *plan.point.choice->outline.problem.table;
  const auto is_open = [&](std::size_t b) {
    return table.keeps_attention(b) && !constraints[b].kept &&
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
  attempt(keep_before(recipe.end()));
  attempt(keep_before(whole));
  SearchPoint first = keep_before(recipe.begin());
  attempt(first);
  for (PlacementStep& step : first.recipe) {
    if (step.kind == TensorClass::activations && step.tier == Tier::device) step.limit = 0;
  }
  attempt(first);
}

/// Moves weights of experts before their router has chosen, if that makes the best plan faster.
void PlanSearch::prefetch_experts(Candidate plan) {
  const step::Problem& problem = plan.point.choice->outline.problem;
  if (problem.table->routing_bytes() == 0 || request_.config.ballast.expert_prefetch) return;
  plan.point.options.prefetches_experts = true;
  measure(plan, step::build(problem, plan.placement, plan.point.options));
  record(std::move(plan));
}

/// Lets blocks of the best plan speculate in the memory that it leaves: first in coarse steps, then
/// with numbers around the best.
void PlanSearch::speculate(const Candidate& plan) {
  const config::BallastSection& ballast = request_.config.ballast;
  if (ballast.speculative_updates || ballast.update != step::Update::gated) return;
  const std::size_t most = max_speculating(plan);
  constexpr std::size_t kParts = 4;
  std::size_t count = 0;
  Candidate best = plan;
  best.tokens_per_second *= kWorthSpeculating;
  const auto attempt = [&](std::size_t blocks) {
    if (blocks == 0 || blocks > most) return;
    Candidate candidate = speculating(plan, blocks);
    if (candidate.tokens_per_second <= best.tokens_per_second) return;
    best = std::move(candidate);
    count = blocks;
  };
  for (std::size_t part = kParts; part > 0; --part) attempt((most * part + kParts - 1) / kParts);
  if (count == 0) return;
  for (const std::size_t step : {most / (2 * kParts), most / (4 * kParts)}) {
    const std::size_t center = count;
    if (step == 0 || center <= step) continue;
    attempt(center + step);
    attempt(center - step);
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

/// Returns `plan` with `count` speculating blocks, simulated.
Candidate PlanSearch::speculating(const Candidate& plan, std::size_t count) {
  const step::Problem& problem = plan.point.choice->outline.problem;
  Candidate candidate = plan;
  candidate.placement = with_speculation(plan.placement, count);
  measure(candidate, step::build(problem, candidate.placement, plan.point.options));
  return candidate;
}

bool PlanSearch::out_of_work() const {
  return work_ > request_.work_limit && simulated_ >= kFewestSimulated;
}

void stop_if_interrupted(const PlanRequest& request) {
  if (request.interrupted == nullptr || !*request.interrupted) return;
  throw Error(ErrorCategory::interrupted, "interrupted while planning");
}

void PlanSearch::attempt(const SearchPoint& point) {
  stop_if_interrupted(request_);
  BatchChoice& choice = *point.choice;
  Candidate candidate;
  candidate.point = point;
  candidate.placement = choice.filler.fill(point.recipe, point.options, &candidate.moved);
  if (choice.filler.excess(candidate.placement, point.options) > 0) return;
  if (!seen_.insert(key_of(choice.micro_batch, point.options, candidate.placement)).second) return;
  try {
    evaluate(std::move(candidate));
  } catch (const Error& error) {
    // For example a machine without drives, which other plans may not need.
    if (error.category() != ErrorCategory::config) throw;
    if (!lacking_) lacking_ = error;
  }
}

void PlanSearch::evaluate(Candidate candidate) {
  const step::Problem& problem = candidate.point.choice->outline.problem;
  const plan::Schedule schedule =
      step::build(problem, candidate.placement, candidate.point.options);
  constexpr std::size_t kPlansBuilt = 3;
  work_ += kPlansBuilt * schedule.steady.operations.size();
  if (!worth_simulating(schedule, problem)) return;
  measure(candidate, schedule);
  record(std::move(candidate));
}

/// Skips plans whose busiest lane alone takes longer than the best step.
bool PlanSearch::worth_simulating(const plan::Schedule& schedule,
                                  const step::Problem& problem) const {
  std::vector<double> seconds(plan::lane_count(schedule.devices));
  for (const plan::Operation& operation : schedule.steady.operations) {
    seconds.at(lane_number(operation)) += seconds_in_turn(operation, schedule, request_.rates);
  }
  const double longest = *std::max_element(seconds.begin(), seconds.end());
  return best_tokens_per_second_ * longest * kTie <= static_cast<double>(problem.tokens_per_step());
}

/// Simulates a candidate.
void PlanSearch::measure(Candidate& candidate, const plan::Schedule& schedule) {
  const step::Problem& problem = candidate.point.choice->outline.problem;
  const plan::Prediction prediction = plan::simulate(schedule, request_.rates, kScreening);
  ++simulated_;
  work_ += (kScreening.warm_up + kScreening.measured) * schedule.steady.operations.size();
  candidate.tokens_per_second =
      static_cast<double>(problem.tokens_per_step()) / prediction.step_seconds;
  candidate.written = schedule.steady.bytes_on(Lane::writeback);
  candidate.moved_bytes = 0;
  for (const Lane lane : plan::kLanes) candidate.moved_bytes += schedule.steady.bytes_on(lane);
  candidate.memory = schedule.bytes(Tier::device) + schedule.bytes(Tier::host);
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
