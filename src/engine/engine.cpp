#include "ballast/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/engine/run_states.h"
#include "ballast/engine/step_types.h"
#include "ballast/model/compute.h"
#include "ballast/state/swap_space.h"

#include "src/engine/held_states.h"
#include "src/engine/initial_weights.h"
#include "src/engine/lanes.h"
#include "src/engine/warm_up.h"

namespace ballast::engine {
Bytes EngineTotals::nvme_bytes_written() const {
  return std::accumulate(nvme_bytes_by_path.begin(), nvme_bytes_by_path.end(), Bytes{0});
}

namespace {

/// Draws initial values from a seed.
class SeededWeights : public WeightSource {
 public:
  explicit SeededWeights(std::uint64_t seed) : seed_(seed) {}
  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) override {
    model::initialize(tensor, seed_, first, out);
  }

 private:
  std::uint64_t seed_;
};

/// Options of the rank's device `number`. `ranks`: nullptr for one rank.
device::DeviceOptions device_options(const Blueprint& blueprint, const EngineOptions& options,
                                     const std::atomic<bool>* interrupted, const comm::Ranks* ranks,
                                     std::uint32_t number) {
  const std::uint32_t rank = ranks == nullptr ? 0 : ranks->launch().local_rank;
  const std::vector<std::uint32_t>& gpus = options.device_numbers;
  return {.kind = options.device,
          .type = blueprint.type,
          .budget = blueprint.budgets.device,
          .compute_threads = options.compute_threads,
          .link_gbps = options.link_gbps,
          .local_rank = gpus.empty() ? rank * blueprint.problem.devices + number : gpus.at(number),
          .needs_libraries = options.kernels.set != model::KernelSet::plain,
          .interrupted = interrupted};
}

model::KernelOptions with_products(model::KernelOptions options,
                                   std::shared_ptr<model::ProductChoices> products) {
  options.products = std::move(products);
  return options;
}

void expect_training(const Blueprint& blueprint) {
  expects(blueprint.options.purpose == step::Purpose::training,
          "engine: a blueprint for evaluation has no states");
}

/// Number of counted targets, or pairs, of all ranks.
std::uint64_t count_targets(const Blueprint& blueprint, comm::Ranks* ranks,
                            std::span<const std::int32_t> own) {
  std::uint64_t count = count_losses(own, blueprint.pairs ? 2 * blueprint.shape.length : 1);
  if (ranks == nullptr) return count;
  std::vector<std::uint64_t> all(ranks->world());
  ranks->all_gather(std::as_bytes(std::span(&count, 1)), std::as_writable_bytes(std::span(all)));
  // All tensor places have the same rows.
  std::uint64_t sum = 0;
  for (std::uint32_t sharer = 0; sharer < blueprint.mesh.sharers(); ++sharer) {
    sum += all[blueprint.mesh.rank_of(sharer, 0)];
  }
  return sum;
}

}  // namespace

Engine::Engine(Blueprint blueprint, EngineOptions options, const std::atomic<bool>* interrupted,
               comm::Ranks* ranks)
    : blueprint_(std::move(blueprint)),
      options_(std::move(options)),
      interrupted_(interrupted),
      ranks_(ranks != nullptr && ranks->world() > 1 ? ranks : nullptr),
      trials_(trials_of(options_.kernels)),
      updater_(options_.update),
      devices_(make_devices()),
      side_(std::make_unique<SideStates>(blueprint_.own())) {
  if (options_.nvtx && !device::profiler_refusal().empty()) {
    throw Error(ErrorCategory::config, "ballast.nvtx: " + device::profiler_refusal());
  }
  check_blueprint();
  if (!state::swap_extents(blueprint_.schedule).empty()) state::check_paths(options_.swap);
}

std::vector<Engine::OwnDevice> Engine::make_devices() const {
  std::vector<OwnDevice> devices(blueprint_.problem.devices);
  for (std::uint32_t number = 0; OwnDevice & own : devices) {
    own.device =
        device::make_device(device_options(blueprint_, options_, interrupted_, ranks_, number++));
    own.compute = model::make_compute(*own.device, blueprint_.own(), blueprint_.type,
                                      blueprint_.shape, with_products(options_.kernels, trials_));
    own.update = update::make_device_update(*own.device, updater_);
  }
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (std::size_t j = i + 1; j < devices.size(); ++j) {
      if (devices[i].device->connect(*devices[j].device)) continue;
      log(LogLevel::debug,
          fmt::format("device: copies between {} and {} pass through host memory",
                      devices[i].device->description(), devices[j].device->description()));
    }
  }
  return devices;
}

void Engine::check_blueprint() const {
  const step::Problem& problem = blueprint_.problem;
  const Mesh& mesh = blueprint_.mesh;
  expects(problem.sharers == mesh.sharers() &&
              mesh.ranks() == (ranks_ == nullptr ? 1 : ranks_->world()) &&
              mesh.rank == (ranks_ == nullptr ? 0 : ranks_->rank()) &&
              mesh.sequence == blueprint_.shape.slices && mesh.tensor == problem.tensor &&
              mesh.tensor == blueprint_.model.split.tensor,
          "engine: the blueprint's mesh differs from the run's ranks");
  const model::StepProgram& program = problem.program();
  bool enough = true;
  for (const OwnDevice& own : devices_) {
    const model::KernelSizes& needed = own.compute->sizes();
    enough = enough && problem.workspace_bytes >= needed.workspace;
    for (const model::StepValue& value : program.values) {
      if (program.classes[value.of].memory != model::MemoryKind::intermediates) continue;
      const bool attention = value.waits == model::Waits::kept_attention;
      const std::vector<Bytes>& kept = attention ? needed.attention : needed.intermediates;
      enough = enough && program.bytes_of(value) >= kept[value.owner];
    }
  }
  expects(enough, "engine: the blueprint reserves too little memory for the device's kernels");
}

Modules Engine::modules() {
  std::vector<DeviceModules> devices;
  devices.reserve(devices_.size());
  for (const OwnDevice& own : devices_) devices.push_back({*own.device, *own.compute, *own.update});
  return {.blueprint = blueprint_,
          .devices = std::move(devices),
          .store = *store_,
          .updater = updater_,
          .side = *side_,
          .ranks = ranks_,
          .preference = options_.preference,
          .gradient_clipping = options_.gradient_clipping,
          .nvtx = options_.nvtx,
          .seed = options_.seed};
}

Engine::~Engine() {
  if (snapshot_) snapshot_->cancel();  // operations may wait for it
  executor_.reset();
}

void Engine::start(WeightSource& source) {
  start_with({}, [&](bool) {
    WholeWeights weights(blueprint_, ranks_);
    comm::collective_try(
        ranks_, [&] { fill_states(blueprint_, source, updater_, weights.hashing(perform())); });
    weights.require_equal();
  });
}

void Engine::start() {
  SeededWeights source(options_.seed);
  start(source);
}

bool Engine::resume(const StateSource& source, std::uint64_t updates, const KeptStates& here,
                    const state::KeptExtents& kept, SideValues side) {
  expect_training(blueprint_);
  side_->set(std::move(side));
  const bool same = same_homes(here.homes, homes_on(blueprint_, Tier::nvme));
  bool reused = false;
  start_with(same ? here.image : state::SwapImage{}, [&](bool reuses) {
    snapshot_->restore(source, reuses, here, kept);
    reused = reuses;
  });
  updates_ = updates;
  return reused;
}

void Engine::start_with(const state::SwapImage& here,
                        const std::function<void(bool reuses)>& fill) {
  expects(!executor_, "engine: start() was called twice");
  bool reuses = false;
  // Collectives follow, so all ranks must learn if one cannot allocate.
  comm::collective_try(ranks_, [&] {
    const auto plan = state::plan_swap(options_.swap, blueprint_.schedule,
                                       blueprint_.options.kept_checkpoints, here, reuses);
    std::vector<device::Device*> devices;
    for (const OwnDevice& own : devices_) devices.push_back(own.device.get());
    store_ = std::make_unique<state::Store>(blueprint_.schedule, std::move(devices), plan);
  });
  lanes_ = std::make_unique<Lanes>(modules());
  snapshot_.emplace(
      blueprint_, *store_, *side_, ranks_, [this] { finish(); }, perform());
  const plan::Schedule& schedule = blueprint_.schedule;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const plan::BufferId workspace = schedule.workspace[d];
    if (workspace == plan::kNoBuffer) continue;
    devices_[d].compute->set_workspace(
        store_->device(workspace, blueprint_.problem.workspace_bytes));
  }
  for (const plan::BufferId id : schedule.batch_host) {
    batches_.push_back(store_->host(id, schedule.buffers[id].bytes));
  }
  const auto begin = std::chrono::steady_clock::now();
  fill(reuses);
  fill_time_ = std::chrono::steady_clock::now() - begin;
  read_side_states();
  if (device().kind() != "host") {
    const auto start_of_warm_up = std::chrono::steady_clock::now();
    warm_up(*lanes_);
    log_start(std::chrono::steady_clock::now() - start_of_warm_up);
  }
  if (trials_) trials_->end();
  executor_ = make_executor([this](const plan::Span& span) {
    if (auto* timeline = timeline_.load()) timeline->spans.push_back(span);
  });
}

void Engine::read_side_states() {
  const bool moves = blueprint_.options.purpose == step::Purpose::training &&
                     options_.router_bias_update_speed > 0.0;
  if (!moves || side_->has(kCorrectionBiases)) return;
  side_->set_from(kCorrectionBiases, [&](std::size_t block, const model::TensorSpec& tensor) {
    return read_master(blueprint_, ranks_, block, tensor.offset, tensor.size, perform());
  });
}

const SideValues& Engine::side_states() const {
  return side_->values();
}

bool Engine::checks_each() const {
  return options_.kernels.checks == model::GpuChecks::each &&
         devices_.front().device->kind() == "cuda";
}

void Engine::log_start(std::chrono::duration<double> warm_up) const {
  if (blueprint_.mesh.rank != 0) return;
  Bytes least_free = std::numeric_limits<Bytes>::max();
  for (std::uint32_t d = 0; d < devices_.size(); ++d) {
    device::DeviceOptions of_device = device_options(blueprint_, options_, interrupted_, ranks_, d);
    of_device.kind = devices_[d].device->kind();
    least_free = std::min(least_free, device::own_memory(of_device));
  }
  log(LogLevel::info, fmt::format("device: {}", arithmetic()));
  log(LogLevel::info,
      fmt::format("device: {} of host memory pinned; {} of device memory free after a warm-up of "
                  "{:.0f} ms",
                  format_bytes(store_->pinned()), format_bytes(least_free), 1e3 * warm_up.count()));
}

StepResult Engine::train_step(const TokenBatch& batch, double learning_rate, double loss_scale) {
  const plan::Plan& plan = training_plan(batch.tokens.size() / blueprint_.shape.tokens());
  const StepContext& context = run(plan, batch, learning_rate, loss_scale);
  pending_updates_ = plan.leaves_updates;
  StepResult result = context.result;
  if (!result.skipped) {
    ++updates_;
    side_->balance(result.expert_rows, options_.router_bias_update_speed);
  }
  const plan::Plan& rollback = blueprint_.schedule.rollback;
  if (rollback.operations.empty()) return result;
  const bool as_assumed =
      !result.skipped && context.hyper.gradient_scale == context.unclipped_scale();
  result.paused = paused_;
  result.rolled_back = !as_assumed && !paused_;
  if (result.rolled_back) {
    executor_->submit(rollback, ++submissions_);
    pending_updates_ = false;
  }
  pace_speculation(as_assumed);
  return result;
}

void Engine::pace_speculation(bool as_assumed) {
  speculation_.note(as_assumed);
  if (!options_.pauses_speculation || speculation_.paused() == paused_) return;
  flush();
  paused_ = !paused_;
  if (blueprint_.mesh.rank == 0) {
    log(gated_ ? LogLevel::debug : LogLevel::info,
        paused_ ? "speculative updates pause, because half of the last 8 steps were clipped or "
                  "skipped; this costs time but changes no result"
                : "speculative updates resume");
  }
  if (gated_) return;
  gated_ = step::build_gated_plans(blueprint_.problem, blueprint_.placement, blueprint_.options);
}

Evaluation Engine::evaluate(const TokenBatch& batch) {
  flush();
  const StepResult& found = run(blueprint_.schedule.evaluation, batch, 0.0, 1.0).result;
  return {found.loss, found.targets};
}

void Engine::finish() {
  expects(executor_ != nullptr, "engine: call start() first");
  flush();
  executor_->drain();
}

void Engine::drain() {
  if (executor_) executor_->drain();
}

EngineTotals Engine::totals() const {
  EngineTotals totals;
  if (!executor_) return totals;
  totals.lanes = lanes_->without_idle(executor_->totals());
  for (const Tier tier : kTiers) {
    totals.allocated[static_cast<std::size_t>(tier)] = store_->allocated(tier);
  }
  for (const OwnDevice& own : devices_) {
    totals.allocated_on_device.push_back(own.device->allocated());
  }
  if (const state::SwapSpace* const swap = store_->swap_space()) {
    for (const aio::QueueCounters& path : swap->counters()) {
      totals.nvme_bytes_by_path.push_back(path.bytes_written);
    }
    totals.io_backend = swap->backend();
  }
  totals.fill_seconds = fill_time_.count();
  return totals;
}

void Engine::record(plan::Timeline* timeline) {
  timeline_ = timeline;
  // The executor calls its observer while it holds its lock. After totals() has held the lock, no
  // thread appends to the previous timeline.
  if (executor_) static_cast<void>(executor_->totals());
}

std::string Engine::arithmetic_of(const OwnDevice& own) {
  const std::string text = own.compute->arithmetic();
  return text.empty() ? own.device->description() : text;
}

std::string Engine::arithmetic() const {
  constexpr int kRoundingRule =
      2;  // increases whenever cpu_adam rounds codes with other random bits
  // Which blocks a device computes matters only if the devices are of different kinds.
  std::string all;
  bool alike = true;
  for (const OwnDevice& own : devices_) {
    const std::string kind = arithmetic_of(own);
    alike = alike && kind == arithmetic_of(devices_.front());
    all += all.empty() ? kind : " and " + kind;
  }
  // The bits do not depend on the number of tensor places.
  const std::uint32_t ranks = blueprint_.mesh.sharers();
  std::string text = fmt::format("{} rank{}, {}", ranks, ranks == 1 ? "" : "s",
                                 alike ? arithmetic_of(devices_.front()) : all);
  if (const std::string choices = trials_ ? trials_->name() : ""; !choices.empty()) {
    text += fmt::format(", products by timed choices {}", choices);
  }
  if (blueprint_.states.moments == cpu_adam::Moments::Format::blockwise8) {
    text += fmt::format(", 8-bit moments rounded by rule {}", kRoundingRule);
  }
  return text;
}

Snapshot& Engine::snapshot() {
  expects(snapshot_.has_value(), "engine: call start() first");
  return *snapshot_;
}

std::unique_ptr<plan::Executor> Engine::make_executor(
    std::function<void(const plan::Span&)> observer) {
  plan::ExecutorOptions options = {
      .finish = [this](const plan::Operation& operation,
                       std::uint64_t) { lanes_->finish(operation); },
      .max_on_stream = device().kind() == "host" ? plan::kMaxEnqueued : plan::kMaxOnFastStream,
      .devices = blueprint_.problem.devices,
      .serial = options_.serial || checks_each(),
      .delay_seed = options_.delay_seed,
      .observer = std::move(observer),
      .interrupted = interrupted_};
  if (ranks_ != nullptr) {
    options.takes_turn = [this](const plan::Operation& operation) {
      return is_collective(blueprint_, operation);
    };
  }
  if (lanes_->streams_collectives()) {
    options.follow = [this](const plan::Operation& next, const plan::Operation& before,
                            std::uint64_t submission) { lanes_->follow(next, before, submission); };
  }
  return std::make_unique<plan::Executor>(
      [this](const plan::Operation& operation, std::uint64_t submission) {
        snapshot_->before(operation);
        lanes_->start(operation, submission);
      },
      step::OperationNames(blueprint_.problem), options);
}

Perform Engine::perform() {
  return [this](const plan::Plan& plan, const Visitor& visitor) {
    lanes_->set_visitor(visitor);
    const auto executor = make_executor(nullptr);
    executor->submit(plan, 0);
    executor->drain();
    lanes_->set_visitor(nullptr);
  };
}

const plan::Plan& Engine::training_plan(std::size_t micro_batches) {
  expect_training(blueprint_);
  const plan::Schedule& schedule = blueprint_.schedule;
  if (micro_batches == blueprint_.micro_batches && paused_) {
    return pending_updates_ ? gated_->steady : gated_->first;
  }
  if (micro_batches == blueprint_.micro_batches) {
    return pending_updates_ || !schedule.steady.leaves_updates ? schedule.steady : schedule.first;
  }
  expects(micro_batches > 0 && micro_batches < blueprint_.micro_batches,
          "engine: wrong batch size");
  const auto key = std::make_tuple(micro_batches, pending_updates_, paused_);
  const auto found = partial_steps_.find(key);
  if (found != partial_steps_.end()) return found->second;
  return partial_steps_
      .emplace(key, step::build_partial_step(
                        blueprint_.problem, blueprint_.placement, blueprint_.options,
                        static_cast<std::uint32_t>(micro_batches), pending_updates_, !paused_))
      .first->second;
}

void Engine::flush() {
  if (!pending_updates_) return;
  executor_->submit(paused_ ? gated_->flush : blueprint_.schedule.flush, ++submissions_);
  pending_updates_ = false;
}

const StepContext& Engine::run(const plan::Plan& plan, const TokenBatch& batch,
                               double learning_rate, double loss_scale) {
  expects(executor_ != nullptr, "engine: call start() first");
  // The last run with batches has passed its gate, so its batches are uploaded.
  copy_batch(blueprint_, batch, plan.micro_batches, batches_);
  const std::uint64_t number = ++submissions_;
  StepContext& context = lanes_->context(number);
  context = {};
  context.micro_batches = plan.micro_batches;
  context.trains = &plan != &blueprint_.schedule.evaluation;
  context.checks_results = checks_each();
  context.result.targets = count_targets(blueprint_, ranks_, batch.targets);
  context.hyper = options_.hyper;
  context.hyper.optimizer = blueprint_.states.optimizer;
  context.hyper.learning_rate = learning_rate;
  context.loss_scale = loss_scale;
  context.hyper.gradient_scale = context.unclipped_scale();
  context.hyper.step = static_cast<std::int64_t>(updates_ + 1);
  executor_->submit(plan, number);
  executor_->wait(plan.gate);
  return context;
}

}  // namespace ballast::engine
