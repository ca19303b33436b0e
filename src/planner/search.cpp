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

using schedule::Lane;

/// Points that are simulated even beyond the work limit.
constexpr std::size_t kFewest = 8;
constexpr schedule::SimulationOptions kScreening = {.warm_up = 2, .measured = 2};
/// The programs that every micro-batch size tries.
constexpr std::size_t kProbation = 4;
/// Plans within 0.1% of the fastest count as equally fast.
constexpr double kTie = 0.999;
/// Steps that are clipped cost more with speculation, so it must gain something in the others.
constexpr double kWorthSpeculating = 1.02;

/// Lower bound of a step's operations, before it is built.
std::size_t least_operations(const Setting& setting) {
  return 2 * setting.outline.model.blocks.size() * setting.outline.micro_batches;
}

/// Equal for points that give the same schedule.
std::string key_of(std::uint64_t micro_batch, const schedule::Options& options,
                   const schedule::Placement& placement) {
  std::string key =
      fmt::format("{}/{}/{}/{}/{}/{}/{}/{}/", micro_batch, static_cast<int>(options.order),
                  options.weight_slots, options.gradient_slots, options.weight_staging,
                  options.state_staging, options.activation_staging, options.gradient_staging);
  for (const auto& block : placement.blocks) {
    key += block.gradients == Tier::nvme ? 'g' : '.';
    key += static_cast<char>('!' + 27 * static_cast<int>(block.keeps_intermediates) +
                             9 * static_cast<int>(block.weights) +
                             3 * static_cast<int>(block.optimizer) +
                             static_cast<int>(block.activations));
  }
  return key;
}

/// Memory of the kernels for micro-batches of `size` sequences or pairs. A program built without
/// CUDA uses the host device's kernels on one thread as an estimate.
model::KernelSizes kernels_of(const PlanRequest& request, std::uint64_t size) {
  const config::Config& config = request.config;
  const config::DataSection& data = config.data;
  const model::MicroBatchShape shape = {size * data.sequences_per_sample(), data.sequence_length};
  if (request.kernels) return request.kernels(shape);
  const bool on_host =
      request.rates.forward.empty()
          ? device::shares_host_cores({.kind = config.ballast.device, .type = config.type})
          : request.rates.shared_cores > 0;
  return model::kernel_memory(request.model, config.type, shape,
                              on_host || !device::cuda_built_in() ? "host" : "cuda",
                              on_host ? config.ballast.compute_threads : 1);
}

}  // namespace

std::vector<std::uint64_t> micro_batch_sizes(const PlanRequest& request) {
  const config::BatchSection& batch = request.config.batch;
  if (batch.train_batch == 0 || batch.train_batch % request.world != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("train_batch_size: {} sequences cannot be shared equally by {} ranks",
                            batch.train_batch, request.world));
  }
  const std::uint64_t share = batch.train_batch / request.world;
  if (!batch.automatic) {
    if (batch.micro_batch == 0 || batch.micro_batch * batch.accumulation != share) {
      throw Error(
          ErrorCategory::config,
          fmt::format("train_batch_size: {} is not train_micro_batch_size_per_gpu {} x "
                      "gradient_accumulation_steps {} x {} ranks",
                      batch.train_batch, batch.micro_batch, batch.accumulation, request.world));
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

config::Config with_micro_batches(const config::Config& config, std::uint64_t size,
                                  std::uint32_t world) {
  config::Config changed = config;
  changed.batch.micro_batch = size;
  changed.batch.accumulation = config.batch.train_batch / world / size;
  changed.batch.automatic = false;
  return changed;
}

std::vector<Program> basic_programs() {
  const auto move = [](Movable kind, Tier tier, Pattern pattern = Pattern::first) {
    // The backward pass needs the activations of the last blocks first.
    const bool of_activations = kind == Movable::activations || kind == Movable::intermediates;
    return Move{kind, tier, of_activations ? Pattern::last : pattern};
  };
  const auto in_order = [&](std::initializer_list<Movable> kinds, Tier tier,
                            Pattern pattern = Pattern::first) {
    Program program;
    for (const Movable kind : kinds) program.push_back(move(kind, tier, pattern));
    return program;
  };
  using enum Movable;
  const std::array<Program, 8> device = {
      in_order({activations, weights, both, optimizer, logits, intermediates}, Tier::device),
      in_order({activations, intermediates, weights, both, optimizer, logits}, Tier::device),
      in_order({activations, both, weights, optimizer, logits, intermediates}, Tier::device),
      in_order({both, activations, weights, optimizer, logits, intermediates}, Tier::device),
      in_order({activations}, Tier::device),
      in_order({intermediates, activations, weights, both, logits}, Tier::device),
      in_order({weights, logits, activations, both, optimizer, intermediates}, Tier::device),
      in_order({}, Tier::device)};
  const std::array<Program, 6> host = {
      in_order({weights, optimizer, activations}, Tier::host),
      in_order({optimizer, weights, activations}, Tier::host),
      in_order({activations, weights, optimizer}, Tier::host),
      in_order({weights, optimizer, activations}, Tier::host, Pattern::spread),
      in_order({both, weights, optimizer, activations}, Tier::host),
      in_order({optimizer, weights, activations}, Tier::host, Pattern::spread)};
  std::vector<Program> programs;
  programs.reserve(device.size() * host.size());
  // Diagonal order: combinations of the most promising programs first.
  for (std::size_t sum = 0; sum + 1 < device.size() + host.size(); ++sum) {
    for (std::size_t d = 0; d <= std::min(sum, device.size() - 1); ++d) {
      if (sum - d < host.size()) programs.push_back(concatenate(device.at(d), host.at(sum - d)));
    }
  }
  return programs;
}

Setting::Setting(const PlanRequest& request, std::uint64_t size)
    : micro_batch(size),
      budgets(request.budgets),
      outline(inputs::outline(with_micro_batches(request.config, size, request.world),
                              request.model, request.budgets, kernels_of(request, size),
                              request.world)),
      constraints(read_constraints(request.config, request.model.blocks.size())),
      filler(outline.workload, constraints, budgets, inputs::named_speculation(request.config)) {}

Search::Search(const PlanRequest& request) : request_(request) {
  for (const std::uint64_t size : micro_batch_sizes(request)) {
    settings_.push_back(std::make_unique<Setting>(request, size));
  }
}

std::optional<Candidate> Search::run() {
  for (const bool swaps : {false, true}) {
    if (swaps && !opens_gradients(request_.config)) break;
    const auto programs = swaps ? with_swapped_gradients(basic_programs()) : basic_programs();
    for (const Buffers number : kBuffers) {
      if (candidates_.empty()) try_programs(programs, number);
    }
  }
  if (candidates_.empty()) try_nearest();
  if (candidates_.empty() && lacking_) throw Error(*lacking_);
  if (candidates_.empty()) return std::nullopt;
  refine();
  prefetch_experts(Candidate(*best()));
  speculate(Candidate(*best()));
  return *best();
}

void Search::try_programs(const std::vector<Program>& programs, Buffers number) {
  constexpr std::size_t kGivenUp = 12;
  constexpr double kHopeless = 0.9;
  for (std::size_t p = 0; p < programs.size(); ++p) {
    for (const auto& setting : settings_) {
      if (out_of_work()) return;
      // Very many, very small micro-batches are tried only if nothing else fits.
      if (!candidates_.empty() && least_operations(*setting) > request_.work_limit / 16) continue;
      if (p >= kProbation && setting->best < kHopeless * best_tokens_per_second_) continue;
      if (p >= kGivenUp && setting->best == 0.0) continue;
      schedule::Options options = with_buffers(request_.config, setting->outline.options, number);
      for (const schedule::Order order : orders(request_.config, options)) {
        options.order = order;
        attempt({setting.get(), options, programs[p]});
      }
    }
  }
}

void Search::try_nearest() {
  const Nearest nearest = come_nearest(request_, Effort::thorough);
  if (nearest.excess > 0) return;
  const auto setting = std::find_if(settings_.begin(), settings_.end(), [&](const auto& candidate) {
    return candidate->micro_batch == nearest.micro_batch;
  });
  std::vector<Program> programs = basic_programs();
  programs.resize(kProbation);
  for (const Program& program : programs) {
    attempt({setting->get(), nearest.options, concatenate(nearest.program, program)});
  }
}

void Search::refine() {
  constexpr std::size_t kRounds = 6;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const double before = best_tokens_per_second_;
    const Candidate* const center = best();
    std::vector<Point> points;
    vary_buffers(*center, points);
    vary_program(*center, points);
    for (const Point& point : points) {
      if (out_of_work()) return;
      attempt(point);
    }
    if (best_tokens_per_second_ <= before * 1.001) return;
  }
}

void Search::vary_buffers(const Candidate& candidate, std::vector<Point>& points) const {
  const config::ZeroSection& zero = request_.config.zero;
  for (const std::uint32_t count : {2U, 4U, 6U, 1U}) {
    const auto with = [&](auto... members) {
      Point point = candidate.point;
      ((point.options.*members = count), ...);
      points.push_back(std::move(point));
    };
    using schedule::Options;
    const bool states = zero.optimizer.buffer_count == 0;
    const bool weights = zero.parameters.buffer_count == 0;
    if (states) with(&Options::state_staging);
    if (weights) with(&Options::weight_staging);
    if (states && weights) with(&Options::state_staging, &Options::weight_staging);
    if (request_.config.ballast.device_weight_buffers == 0) with(&Options::weight_slots);
    if (request_.config.ballast.device_gradient_buffers == 0 && count < 4) {
      with(&Options::gradient_slots);
    }
    if (request_.config.ballast.activation_buffers == 0) with(&Options::activation_staging);
    if (request_.config.ballast.gradient_buffers == 0) with(&Options::gradient_staging);
  }
}

void Search::vary_program(const Candidate& candidate, std::vector<Point>& points) const {
  const Program& program = candidate.point.program;
  for (std::size_t i = 0; i < program.size(); ++i) {
    const std::size_t count = candidate.moved[i];
    if (count == 0) continue;
    std::set<std::size_t> limits = {0, count / 2, count * 3 / 4, count - 1};
    if (count > 2) limits.insert(count - 2);
    if (count > 4) limits.insert(count - 4);
    for (const std::size_t limit : limits) {
      if (limit == count) continue;
      Point point = candidate.point;
      point.program[i].limit = limit;
      points.push_back(std::move(point));
    }
    for (const Pattern pattern : {Pattern::first, Pattern::last, Pattern::spread}) {
      if (pattern == program[i].pattern) continue;
      Point point = candidate.point;
      point.program[i].pattern = pattern;
      points.push_back(std::move(point));
    }
  }
}

/// Moves weights of experts before their router has chosen, if that makes the best plan faster.
void Search::prefetch_experts(Candidate plan) {
  const schedule::Workload& workload = plan.point.setting->outline.workload;
  if (workload.routing_bytes == 0 || request_.config.ballast.expert_prefetch) return;
  plan.point.options.prefetches_experts = true;
  measure(plan, schedule::build(workload, plan.placement, plan.point.options));
  record(std::move(plan));
}

/// Lets blocks of the best plan speculate, in memory that it leaves: parts of them first, then
/// numbers around the best.
void Search::speculate(const Candidate& plan) {
  const config::BallastSection& ballast = request_.config.ballast;
  if (ballast.speculative_updates || ballast.update != "gated") return;
  const std::size_t most = most_speculating(plan);
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

/// The largest number of speculating blocks whose old values find room beside `plan`.
std::size_t Search::most_speculating(const Candidate& plan) const {
  const Setting& setting = *plan.point.setting;
  const Bytes drives = request_.rates.nvme_bytes;
  const auto fits = [&](std::size_t count) {
    const memory::Ledger ledger = engine::make_ledger(schedule::sum_buffers(
        setting.outline.workload, with_speculation(plan.placement, count), plan.point.options));
    return ledger.fits(setting.budgets) && (drives == 0 || ledger.total(Tier::nvme) <= drives);
  };
  const auto& blocks = plan.placement.blocks;
  auto too_many = 1 + static_cast<std::size_t>(std::count_if(
                          blocks.begin(), blocks.end(), [](const schedule::BlockPlacement& block) {
                            return block.optimizer != Tier::device;
                          }));
  std::size_t most = 0;
  while (too_many - most > 1) {
    const std::size_t middle = most + (too_many - most) / 2;
    (fits(middle) ? most : too_many) = middle;
  }
  return most;
}

/// `plan` with `count` speculating blocks, simulated.
Candidate Search::speculating(const Candidate& plan, std::size_t count) {
  const schedule::Workload& workload = plan.point.setting->outline.workload;
  Candidate candidate = plan;
  candidate.placement = with_speculation(plan.placement, count);
  measure(candidate, schedule::build(workload, candidate.placement, plan.point.options));
  return candidate;
}

bool Search::out_of_work() const {
  return work_ > request_.work_limit && simulated_ >= kFewest;
}

void stop_if_interrupted(const PlanRequest& request) {
  if (request.interrupted == nullptr || !*request.interrupted) return;
  throw Error(ErrorCategory::interrupted, "interrupted while planning");
}

void Search::attempt(const Point& point) {
  stop_if_interrupted(request_);
  Setting& setting = *point.setting;
  Candidate candidate;
  candidate.point = point;
  candidate.placement = setting.filler.fill(point.program, point.options, &candidate.moved);
  if (setting.filler.excess(candidate.placement, point.options) > 0) return;
  if (!seen_.insert(key_of(setting.micro_batch, point.options, candidate.placement)).second) return;
  try {
    evaluate(std::move(candidate));
  } catch (const Error& error) {
    // For example a machine without drives: other plans may not need them.
    if (error.category() != ErrorCategory::config) throw;
    if (!lacking_) lacking_ = error;
  }
}

void Search::evaluate(Candidate candidate) {
  const schedule::Workload& workload = candidate.point.setting->outline.workload;
  const schedule::Schedule schedule =
      schedule::build(workload, candidate.placement, candidate.point.options);
  constexpr std::size_t kPlansBuilt = 3;
  work_ += kPlansBuilt * schedule.steady.operations.size();
  if (!worth_simulating(schedule, workload)) return;
  measure(candidate, schedule);
  record(std::move(candidate));
}

/// Skips plans whose busiest lane alone takes longer than the best step.
bool Search::worth_simulating(const schedule::Schedule& schedule,
                              const schedule::Workload& workload) const {
  std::array<double, schedule::kLaneCount> seconds{};
  for (const schedule::Operation& operation : schedule.steady.operations) {
    seconds.at(static_cast<std::size_t>(operation.lane)) +=
        seconds_in_turn(operation, schedule, request_.rates);
  }
  const double longest = *std::max_element(seconds.begin(), seconds.end());
  return best_tokens_per_second_ * longest * kTie <=
         static_cast<double>(workload.tokens_per_step());
}

/// Simulates a candidate.
void Search::measure(Candidate& candidate, const schedule::Schedule& schedule) {
  const schedule::Workload& workload = candidate.point.setting->outline.workload;
  const schedule::Prediction prediction = schedule::simulate(schedule, request_.rates, kScreening);
  ++simulated_;
  work_ += (kScreening.warm_up + kScreening.measured) * schedule.steady.operations.size();
  candidate.tokens_per_second =
      static_cast<double>(workload.tokens_per_step()) / prediction.step_seconds;
  candidate.written = schedule.steady.bytes_on(Lane::writeback);
  candidate.moved_bytes = 0;
  for (const Lane lane : schedule::kLanes) candidate.moved_bytes += schedule.steady.bytes_on(lane);
  candidate.memory = schedule.bytes(Tier::device) + schedule.bytes(Tier::host);
}

void Search::record(Candidate candidate) {
  Setting& setting = *candidate.point.setting;
  setting.best = std::max(setting.best, candidate.tokens_per_second);
  best_tokens_per_second_ = std::max(best_tokens_per_second_, candidate.tokens_per_second);
  candidates_.push_back(std::move(candidate));
}

/// Among the candidates within 0.1% of the fastest: the one that writes least to NVMe, then moves
/// the fewest bytes, then uses the least memory, then was tried first.
const Candidate* Search::best() const {
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
