#include "src/planning/search.h"

#include <algorithm>
#include <array>
#include <tuple>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::planning {
namespace {

using schedule::Lane;

/// Points that are tried however large the plans are.
constexpr std::size_t kFewest = 8;
constexpr schedule::SimulationOptions kScreening = {.warm_up = 2, .measured = 2};
/// Two plans that the simulator sees this close together are equally fast.
constexpr double kTie = 0.999;

/// Operations of a step, as far as they can be known before it is built.
std::size_t least_operations(const Setting& setting) {
  return 2 * setting.outline.model.blocks.size() * setting.outline.micro_batches;
}

/// Equal for points that give the same schedule.
std::string key_of(std::uint64_t micro_batch, const schedule::Options& options,
                   const schedule::Placement& placement) {
  std::string key = fmt::format("{}/{}/{}/{}/{}/{}/", micro_batch, static_cast<int>(options.order),
                                options.weight_slots, options.weight_staging, options.state_staging,
                                options.activation_staging);
  for (const auto& block : placement.blocks) {
    key += static_cast<char>('!' + 27 * static_cast<int>(block.keeps_intermediates) +
                             9 * static_cast<int>(block.weights) +
                             3 * static_cast<int>(block.optimizer) +
                             static_cast<int>(block.activations));
  }
  return key;
}

Program concatenate(const Program& device, const Program& host) {
  Program program = device;
  program.insert(program.end(), host.begin(), host.end());
  return program;
}

}  // namespace

std::vector<std::uint64_t> micro_batch_sizes(const Question& question) {
  const config::BatchSection& batch = question.config.batch;
  if (batch.train_batch == 0 || batch.train_batch % question.world != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("train_batch_size: {} sequences cannot be shared equally by {} ranks",
                            batch.train_batch, question.world));
  }
  const std::uint64_t share = batch.train_batch / question.world;
  if (!batch.automatic) {
    if (batch.micro_batch == 0 || batch.micro_batch * batch.accumulation != share) {
      throw Error(
          ErrorCategory::config,
          fmt::format("train_batch_size: {} is not train_micro_batch_size_per_gpu {} x "
                      "gradient_accumulation_steps {} x {} ranks",
                      batch.train_batch, batch.micro_batch, batch.accumulation, question.world));
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

schedule::Options smallest_buffers(const config::Config& config, schedule::Options options) {
  if (config.zero.optimizer.buffer_count == 0) options.state_staging = 1;
  if (config.zero.parameters.buffer_count == 0) options.weight_staging = 1;
  if (config.ballast.device_weight_buffers == 0) options.weight_slots = 2;
  if (config.ballast.activation_buffers == 0) options.activation_staging = 1;
  return options;
}

namespace {

/// Those that `config` leaves open; else that of `options`.
std::vector<schedule::Order> orders(const config::Config& config,
                                    const schedule::Options& options) {
  if (config.ballast.order != "auto") return {options.order};
  return {schedule::Order::layer_major, schedule::Order::micro_batch_major};
}

}  // namespace

std::vector<Program> basic_programs() {
  const auto move = [](Part part, Tier tier, Pattern pattern = Pattern::first) {
    // The inputs of the last blocks are the first that the backward pass wants back.
    const bool of_activations = part == Part::activations || part == Part::intermediates;
    return Move{part, tier, of_activations ? Pattern::last : pattern};
  };
  const auto in_order = [&](std::initializer_list<Part> parts, Tier tier,
                            Pattern pattern = Pattern::first) {
    Program program;
    for (const Part part : parts) program.push_back(move(part, tier, pattern));
    return program;
  };
  using enum Part;
  const std::array<Program, 8> device = {
      in_order({activations, weights, both, optimizer, intermediates}, Tier::device),
      in_order({activations, intermediates, weights, both, optimizer}, Tier::device),
      in_order({activations, both, weights, optimizer, intermediates}, Tier::device),
      in_order({both, activations, weights, optimizer, intermediates}, Tier::device),
      in_order({activations}, Tier::device),
      in_order({intermediates, activations, weights, both}, Tier::device),
      in_order({weights, activations, both, optimizer, intermediates}, Tier::device),
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
  // Diagonals: the most promising of both come first.
  for (std::size_t sum = 0; sum + 1 < device.size() + host.size(); ++sum) {
    for (std::size_t d = 0; d <= std::min(sum, device.size() - 1); ++d) {
      if (sum - d < host.size()) programs.push_back(concatenate(device.at(d), host.at(sum - d)));
    }
  }
  return programs;
}

Setting::Setting(const Question& question, std::uint64_t size)
    : micro_batch(size),
      budgets(question.budgets),
      outline(engine::outline(
          with_micro_batches(question.config, size, question.world), question.model,
          question.budgets, question.kernel_memory_of({size, question.config.data.sequence_length}),
          question.world)),
      wishes(engine::read_wishes(question.config, question.model.blocks.size())),
      filler(outline.workload, wishes, budgets) {}

Search::Search(const Question& question) : question_(question) {
  for (const std::uint64_t size : micro_batch_sizes(question)) {
    settings_.push_back(std::make_unique<Setting>(question, size));
  }
}

std::optional<Trial> Search::run() {
  try_basic(false);
  if (trials_.empty()) try_basic(true);
  if (trials_.empty() && lacking_) throw Error(*lacking_);
  if (trials_.empty()) return std::nullopt;
  refine();
  return *best();
}

void Search::try_basic(bool few_buffers) {
  constexpr std::size_t kProbation = 4;
  constexpr std::size_t kGivenUp = 12;
  constexpr double kHopeless = 0.9;
  const std::vector<Program> programs = basic_programs();
  for (std::size_t p = 0; p < programs.size(); ++p) {
    for (const auto& setting : settings_) {
      if (out_of_work()) return;
      // Very many, very small micro-batches are a way out when nothing else fits.
      if (!trials_.empty() && least_operations(*setting) > question_.work_limit / 16) continue;
      if (p >= kProbation && setting->best < kHopeless * best_tokens_per_second_) continue;
      if (p >= kGivenUp && setting->best == 0.0) continue;
      schedule::Options options = setting->outline.options;
      if (few_buffers) options = smallest_buffers(question_.config, options);
      for (const schedule::Order order : orders(question_.config, options)) {
        options.order = order;
        attempt({setting.get(), options, programs[p]});
      }
    }
  }
}

void Search::refine() {
  constexpr std::size_t kRounds = 6;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const double before = best_tokens_per_second_;
    const std::vector<Point> points = neighbours(*best());
    for (const Point& point : points) {
      if (out_of_work()) return;
      attempt(point);
    }
    if (best_tokens_per_second_ <= before * 1.001) return;
  }
}

std::vector<Point> Search::neighbours(const Trial& trial) const {
  std::vector<Point> points;
  vary_buffers(trial, points);
  vary_program(trial, points);
  return points;
}

void Search::vary_buffers(const Trial& trial, std::vector<Point>& points) const {
  const config::ZeroSection& zero = question_.config.zero;
  for (const std::uint32_t count : {2U, 4U, 6U, 1U}) {
    const auto with = [&](auto... members) {
      Point point = trial.point;
      ((point.options.*members = count), ...);
      points.push_back(std::move(point));
    };
    using schedule::Options;
    const bool states = zero.optimizer.buffer_count == 0;
    const bool weights = zero.parameters.buffer_count == 0;
    if (states) with(&Options::state_staging);
    if (weights) with(&Options::weight_staging);
    if (states && weights) with(&Options::state_staging, &Options::weight_staging);
    if (question_.config.ballast.device_weight_buffers == 0 && count > 1) {
      with(&Options::weight_slots);
    }
    if (question_.config.ballast.activation_buffers == 0) with(&Options::activation_staging);
  }
}

void Search::vary_program(const Trial& trial, std::vector<Point>& points) const {
  const Program& program = trial.point.program;
  for (std::size_t i = 0; i < program.size(); ++i) {
    const std::size_t count = trial.moved[i];
    if (count == 0) continue;
    std::set<std::size_t> limits = {0, count / 2, count * 3 / 4, count - 1};
    if (count > 2) limits.insert(count - 2);
    if (count > 4) limits.insert(count - 4);
    for (const std::size_t limit : limits) {
      if (limit == count) continue;
      Point point = trial.point;
      point.program[i].limit = limit;
      points.push_back(std::move(point));
    }
    for (const Pattern pattern : {Pattern::first, Pattern::last, Pattern::spread}) {
      if (pattern == program[i].pattern) continue;
      Point point = trial.point;
      point.program[i].pattern = pattern;
      points.push_back(std::move(point));
    }
  }
}

bool Search::out_of_work() const {
  return work_ > question_.work_limit && simulated_ >= kFewest;
}

void Search::attempt(const Point& point) {
  Setting& setting = *point.setting;
  Trial trial;
  trial.point = point;
  trial.placement = setting.filler.fill(point.program, point.options, &trial.moved);
  if (setting.filler.excess(trial.placement, point.options) > 0) return;
  if (!seen_.insert(key_of(setting.micro_batch, point.options, trial.placement)).second) return;
  try {
    evaluate(std::move(trial));
  } catch (const Error& error) {
    // A machine without drives, say: other plans may do without.
    if (error.category() != ErrorCategory::config) throw;
    if (!lacking_) lacking_ = error;
  }
}

void Search::evaluate(Trial trial) {
  const schedule::Workload& workload = trial.point.setting->outline.workload;
  const schedule::Schedule schedule =
      schedule::build(workload, trial.placement, trial.point.options);
  constexpr std::size_t kPlansBuilt = 3;
  work_ += kPlansBuilt * schedule.steady.operations.size();
  if (worth_simulating(schedule, workload)) judge(std::move(trial), schedule);
}

/// A step takes at least as long as its busiest lane alone.
bool Search::worth_simulating(const schedule::Schedule& schedule,
                              const schedule::Workload& workload) const {
  std::array<double, schedule::kLaneCount> seconds{};
  for (const schedule::Operation& operation : schedule.steady.operations) {
    seconds.at(static_cast<std::size_t>(operation.lane)) +=
        seconds_in_turn(operation, workload, question_.rates);
  }
  const double longest = *std::max_element(seconds.begin(), seconds.end());
  return best_tokens_per_second_ * longest * kTie <=
         static_cast<double>(workload.tokens_per_step());
}

void Search::judge(Trial trial, const schedule::Schedule& schedule) {
  Setting& setting = *trial.point.setting;
  const schedule::Workload& workload = setting.outline.workload;
  const schedule::Prediction prediction =
      schedule::simulate(schedule, workload, question_.rates, kScreening);
  ++simulated_;
  work_ += (kScreening.warm_up + kScreening.measured) * schedule.steady.operations.size();
  trial.tokens_per_second =
      static_cast<double>(workload.tokens_per_step()) / prediction.step_seconds;
  trial.written = schedule.steady.bytes_on(Lane::writeback);
  for (const Lane lane : schedule::kLanes) trial.moved_bytes += schedule.steady.bytes_on(lane);
  trial.memory = schedule.bytes(Tier::device) + schedule.bytes(Tier::host);
  setting.best = std::max(setting.best, trial.tokens_per_second);
  best_tokens_per_second_ = std::max(best_tokens_per_second_, trial.tokens_per_second);
  trials_.push_back(std::move(trial));
}

/// Of those that are as good as equally fast: what writes least to NVMe, then what moves the fewest
/// bytes, then what takes the least memory, then what was tried first.
const Trial* Search::best() const {
  const Trial* best = nullptr;
  const auto cost = [](const Trial& trial) {
    return std::tuple(trial.written, trial.moved_bytes, trial.memory);
  };
  for (const Trial& trial : trials_) {
    if (trial.tokens_per_second < kTie * best_tokens_per_second_) continue;
    if (best == nullptr || cost(trial) < cost(*best)) best = &trial;
  }
  return best;
}

}  // namespace ballast::planning
