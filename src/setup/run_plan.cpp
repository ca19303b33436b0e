#include "ballast/setup/run_plan.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/planner/planner.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "src/calibrate/machine_share.h"

namespace ballast::setup {

void apply_common_share(config::Config& config, const calibrate::MachineShare& share) {
  auto& ballast = config.ballast;
  const memory::Budgets budgets = memory::resolve_budgets(
      {ballast.device_bytes, ballast.host_bytes}, share.memory,
      {.free = share.device_memory, .channels = channels_per_device(config, share.world)},
      budgeted_devices(config));
  ballast.device_bytes = budgets.device;
  ballast.host_bytes = budgets.host;
  // The ranks compute on devices of one kind: on GPUs if each rank has one.
  if (ballast.device == config::DeviceChoice::automatic) {
    ballast.device =
        share.device_memory > 0 ? config::DeviceChoice::cuda : config::DeviceChoice::host;
  }
  if (ballast.compute_threads == 0) ballast.compute_threads = share.compute_threads;
}

void apply_own_share(config::Config& config, const calibrate::MachineShare& share) {
  auto& ballast = config.ballast;
  if (!ballast.update_numa_node && share.numa_node >= 0) ballast.update_numa_node = share.numa_node;
  if (ballast.update_threads == 0 && share.sharing > 1) ballast.update_threads = share.cpus;
}

namespace {

using Clock = std::chrono::steady_clock;

calibrate::MachineShare find_share(comm::Ranks& ranks, const config::Config& config) {
  const calibrate::RankPlace mine =
      calibrate::read_place(ranks.launch(), own_device_memory(config, ranks.launch().local_rank));
  std::vector<calibrate::RankPlace> all(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return calibrate::share_of(all, ranks.rank());
}

/// Bytes per second that one rank receives when all ranks exchange; the best of a few tries.
double measure_exchange(comm::Ranks& ranks) {
  constexpr int kTries = 3;
  const Bytes part = std::max(64 * kKiB, 32 * kMiB / ranks.world());
  const std::vector<std::byte> mine(part);
  std::vector<std::byte> whole(part * ranks.world());
  double seconds = std::numeric_limits<double>::max();
  for (int i = 0; i < kTries; ++i) {
    ranks.barrier();
    const auto start = Clock::now();
    ranks.all_gather(mine, whole);
    seconds = std::min(seconds, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return static_cast<double>(whole.size() - part) / std::max(seconds, 1e-9);
}

/// Waits on all ranks until rank 0's `work` is done. Polls with short collectives, so that no wait
/// exceeds the timeout for lost ranks.
void wait_for_root(comm::Ranks& ranks, const std::future<RunPlan>& work, double timeout_seconds) {
  const std::chrono::duration<double> pause(std::min(1.0, timeout_seconds / 4.0));
  std::vector<std::byte> done(ranks.world());
  do {
    const bool mine = work.valid() && work.wait_for(pause) == std::future_status::ready;
    const std::byte part{mine ? std::uint8_t{1} : std::uint8_t{0}};
    ranks.all_gather(std::span(&part, 1), done);
  } while (done.front() == std::byte{0});
}

/// Returns the budgets of a run on this machine with the rates of a file, which may describe a
/// larger machine.
memory::Budgets budgets_here(const config::Config& config, const plan::Rates& rates,
                             std::uint32_t world) {
  const memory::Budgets here = budgets_of(config, {}, world);
  const memory::Budgets there = budgets_of(config, rates, world);
  return {std::min(here.device, there.device), std::min(here.host, there.host)};
}

/// Decides a config that leaves choices. With `peers`, its budgets and threads are one rank's.
/// `given` rates are for one rank.
RunPlan decide_open(const config::Config& config, const calibrate::PeerRanks& peers,
                    const std::atomic<bool>* interrupted, const std::optional<plan::Rates>& given) {
  planner::PlanRequest request = plan_request(config, peers.world);
  request.budgets = budgets_here(config, given.value_or(plan::Rates{}), peers.world);
  request.devices = engine::available_devices(request.run.devices, peers.local_world);
  request.interrupted = interrupted;
  planner::require_fit(request);
  if (given) {
    request.rates = *given;
    // Rates of a GPU would be mistaken for rates without shared cores.
    request.kernels = kernels_here(request.run);
  } else {
    request.rates = calibrate::machine_rates(planner::measured_run(request), false, interrupted,
                                             {.beside_ranks = peers.world > 1});
    if (peers.world > 1) calibrate::share_out(request.rates, peers);
  }
  planner::Decision decision = planner::decide(request);
  config::Config decided = settle(config, decision.blueprint);
  const config::BatchSection& batch = decided.batch;
  const step::Options& options = decision.blueprint.options;
  log(LogLevel::info,
      fmt::format(
          "planner: {} plans simulated; {}{} micro-batch{} of {}, {} buffer{} for weights and "
          "{} for optimizer states, {:.3g} s per step predicted",
          decision.simulated,
          config.pipeline.stages == 0 ? fmt::format("pipeline.stages {}, ", decided.pipeline.stages)
                                      : "",
          batch.accumulation, batch.accumulation == 1 ? "" : "es", batch.micro_batch,
          options.buffers.weight_staging, options.buffers.weight_staging == 1 ? "" : "s",
          options.buffers.state_staging, decision.prediction.step_seconds));
  request.interrupted = nullptr;  // the advice at the end of the run is not part of planning
  return {std::move(decided), std::move(decision), std::move(request), given};
}

/// The config of a run before its plan is drawn.
struct PlanInputs {
  config::Config config;
  std::optional<PlanChoices> chosen;  ///< from a saved plan
  std::optional<plan::Rates> rates;   ///< from a saved plan or a file
};

PlanInputs read_source(const PlanSource& source, const config::Config& config,
                       std::uint32_t world) {
  if (!source.plan.empty()) {
    AppliedPlan plan = read_plan(source.plan, config, world);
    log(LogLevel::info, fmt::format("planner: the saved plan {}", source.plan.string()));
    return {std::move(plan.config), std::move(plan.chosen), std::move(plan.rates)};
  }
  if (!source.rates.empty()) return {config, std::nullopt, calibrate::given_rates(source.rates)};
  return {config, std::nullopt, std::nullopt};
}

RunPlan plan_alone(const config::Config& config, const std::atomic<bool>* interrupted,
                   const PlanSource& source) {
  PlanInputs inputs = read_source(source, config, 1);
  if (!inputs.chosen && leaves_choices(inputs.config)) {
    return decide_open(inputs.config, {}, interrupted, inputs.rates);
  }
  RunPlan plan;
  if (inputs.chosen) {
    Drawn drawn = draw_chosen(inputs.config, *inputs.chosen);
    plan.config = std::move(drawn.config);
    plan.decision.blueprint = std::move(drawn.blueprint);
  } else {
    plan.decision.blueprint = draw_blueprint(inputs.config);
    plan.config = std::move(inputs.config);
  }
  plan.given_rates = std::move(inputs.rates);
  return plan;
}

/// Plans a run of several ranks: rank 0 sends its config and the choices for it as data, and each
/// rank draws its blueprint from them.
class JointPlanning {
 public:
  JointPlanning(comm::Ranks& ranks, const std::atomic<bool>* interrupted)
      : ranks_(ranks), interrupted_(interrupted), is_root_(ranks.rank() == 0) {}

  RunPlan plan(const config::Config& config, const PlanSource& source) {
    const calibrate::MachineShare share = find_share(ranks_, config);
    PlanInputs inputs = share_inputs(config, source, share);
    config::Config own = std::move(inputs.config);
    apply_own_share(own, share);
    RunPlan plan;
    if (!inputs.chosen && leaves_choices(own)) {
      plan = decide_at_root(own, share, config.ballast.comm_timeout_seconds, inputs.rates);
      inputs.chosen = from_root([&] { return choices_of(plan.decision.blueprint); });
    }
    if (inputs.chosen) {
      draw(own, *inputs.chosen, plan);
    } else {
      draw_by_rule(own, plan);
    }
    return plan;
  }

 private:
  /// Sends the inputs that rank 0 has read to all ranks; rates stay on rank 0.
  PlanInputs share_inputs(const config::Config& config, const PlanSource& source,
                          const calibrate::MachineShare& share) {
    PlanInputs inputs;
    text::Json message;
    comm::collective_try(&ranks_, [&] {
      if (!is_root_) return;
      inputs = read_source(source, config, ranks_.world());
      apply_common_share(inputs.config, share);
      message["config"] = text::parse_json(config::print(inputs.config), kName);
      if (inputs.chosen) message["choices"] = choices_json(*inputs.chosen);
    });
    const text::Json received = exchange(message);
    if (is_root_) return inputs;
    inputs.config = config::parse(received.find("config")->compact(), "/", kName, own_paths(config),
                                  ranks_.world());
    if (const auto* const chosen = received.find("choices")) inputs.chosen = read_choices(*chosen);
    return inputs;
  }

  /// Returns overrides with the paths from which this rank reads, which may differ from rank 0's.
  static std::vector<std::string> own_paths(const config::Config& config) {
    std::vector<std::string> overrides;
    const auto add = [&](std::string_view key, const std::filesystem::path& path) {
      if (path.empty()) return;
      overrides.push_back(fmt::format("{}={}", key, text::Json(path.string()).compact()));
    };
    add("model.weights", config.initial_weights);
    if (config.ballast.adapters) add("ballast.adapters.path", config.ballast.adapters->path);
    return overrides;
  }

  /// Returns the decision of rank 0 for the choices that `own` leaves open; empty on other ranks.
  RunPlan decide_at_root(const config::Config& own, const calibrate::MachineShare& share,
                         double timeout_seconds, const std::optional<plan::Rates>& rates) {
    const calibrate::PeerRanks peers = {.world = ranks_.world(),
                                        .local_world = ranks_.launch().local_world,
                                        .sharing = static_cast<std::uint32_t>(share.sharing),
                                        .received_per_second = measure_exchange(ranks_)};
    std::future<RunPlan> decided;
    if (is_root_) {
      decided = std::async(std::launch::async, [own, peers, rates, interrupted = interrupted_] {
        return decide_open(own, peers, interrupted, rates);
      });
    }
    wait_for_root(ranks_, decided, timeout_seconds);
    RunPlan plan;
    comm::collective_try(&ranks_, [&] {
      if (is_root_) plan = decided.get();
    });
    return plan;
  }

  /// Draws the chosen plan. Rank 0 keeps the blueprint of its decision.
  void draw(const config::Config& own, const PlanChoices& chosen, RunPlan& plan) {
    comm::collective_try(&ranks_, [&] {
      if (plan.request) {
        plan.config = settle(own, plan.decision.blueprint);
        return;
      }
      Drawn drawn = draw_chosen(own, chosen, &ranks_);
      plan.config = std::move(drawn.config);
      plan.decision.blueprint = std::move(drawn.blueprint);
    });
  }

  /// Draws a config without choices. All ranks exchange data in the order of rank 0, whatever
  /// memory each of them has.
  void draw_by_rule(config::Config own, RunPlan& plan) {
    engine::Blueprint& blueprint = plan.decision.blueprint;
    comm::collective_try(&ranks_, [&] { blueprint = draw_blueprint(own, &ranks_); });
    const step::Order drawn = blueprint.options.order;
    own.ballast.order = from_root([&] { return choices_of(blueprint); }).order;
    comm::collective_try(&ranks_, [&] {
      if (own.ballast.order != drawn) blueprint = draw_blueprint(own, &ranks_);
    });
    plan.config = std::move(own);
  }

  /// Returns the choices of rank 0 on all ranks. `choices` is called on rank 0.
  PlanChoices from_root(const std::function<PlanChoices()>& choices) {
    return read_choices(exchange(is_root_ ? choices_json(choices()) : text::Json()));
  }
  /// Returns the message of rank 0.
  text::Json exchange(const text::Json& message) {
    return text::parse_json(ranks_.broadcast(is_root_ ? message.compact() : ""), kName);
  }

  static constexpr const char* kName = "the config of rank 0";

  comm::Ranks& ranks_;
  const std::atomic<bool>* interrupted_;
  bool is_root_;
};

}  // namespace

config::Config with_tiles_of_root(const config::Config& config, comm::Ranks* ranks) {
  config::Config settled = config;
  if (ranks == nullptr) return settled;
  const std::string sent = ranks->broadcast(
      fmt::format("[{},{}]", settled.model.vocabulary_tiles, settled.model.layer_tiles));
  const text::Json received = text::parse_json(sent, "the tiles of rank 0");
  settled.model.vocabulary_tiles = received.elements().at(0).whole().value();
  settled.model.layer_tiles = received.elements().at(1).whole().value();
  return settled;
}

config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted, const PlanSource& source) {
  if (!config.open_tiles.any()) return config;
  config::Config settled = config;
  const auto find = [&](const config::Config& shared, std::uint32_t world,
                        std::uint32_t local_world) {
    if (!source.plan.empty()) return take_tiles(source.plan, settled);
    const plan::Rates rates =
        source.rates.empty() ? plan::Rates{} : calibrate::given_rates(source.rates);
    planner::PlanRequest request = plan_request(shared, world);
    request.budgets = budgets_here(shared, rates, world);
    request.devices = engine::available_devices(request.run.devices, local_world);
    request.interrupted = interrupted;
    const model::ModelConfig fitting = planner::fitting_tiles(request);
    settled.model.vocabulary_tiles = fitting.vocabulary_tiles;
    settled.model.layer_tiles = fitting.layer_tiles;
  };
  if (ranks == nullptr) {
    find(config, 1, 1);
    return settled;
  }
  const calibrate::MachineShare share = find_share(*ranks, config);
  comm::collective_try(ranks, [&] {
    if (ranks->rank() != 0) return;
    config::Config shared = config;
    apply_common_share(shared, share);
    find(shared, ranks->world(), ranks->launch().local_world);
  });
  return with_tiles_of_root(settled, ranks);
}

RunPlan plan_run(const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* interrupted, const PlanSource& source) {
  return ranks == nullptr || ranks->world() == 1
             ? plan_alone(config, interrupted, source)
             : JointPlanning(*ranks, interrupted).plan(config, source);
}

}  // namespace ballast::setup
