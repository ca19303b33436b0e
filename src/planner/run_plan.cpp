#include "ballast/planner/run_plan.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/calibrate/rates_file.h"
#include "ballast/comm/collective_try.h"
#include "ballast/core/log.h"
#include "ballast/device/device.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/draw_blueprint.h"
#include "ballast/planner/forecast.h"
#include "ballast/planner/saved_plan.h"

#include "src/calibrate/machine_share.h"

namespace ballast::planner {
namespace {

using Clock = std::chrono::steady_clock;

calibrate::MachineShare find_share(comm::Ranks& ranks, const config::Config& config) {
  const calibrate::RankPlace mine = calibrate::read_place(ranks.launch(), config);
  std::vector<calibrate::RankPlace> all(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return calibrate::share_of(all, ranks.rank());
}

/// Bytes per second that one rank receives when all exchange; the best of a few tries.
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
void wait_for_first(comm::Ranks& ranks, const std::future<RunPlan>& work, double timeout_seconds) {
  const std::chrono::duration<double> pause(std::min(1.0, timeout_seconds / 4.0));
  std::vector<std::byte> done(ranks.world());
  do {
    const bool mine = work.valid() && work.wait_for(pause) == std::future_status::ready;
    const std::byte part{mine ? std::uint8_t{1} : std::uint8_t{0}};
    ranks.all_gather(std::span(&part, 1), done);
  } while (done.front() == std::byte{0});
}

/// Budgets of a run on this machine with the rates of a file, which may describe a larger machine.
memory::Budgets budgets_here(const config::Config& config, const schedule::Rates& rates) {
  const memory::Budgets here = budgets_of(config, {});
  const memory::Budgets there = budgets_of(config, rates);
  return {std::min(here.device, there.device), std::min(here.host, there.host)};
}

/// Decides a config that leaves choices; with `peers`, its budgets and threads are one rank's.
/// `given` rates are those of one rank.
RunPlan decide_open(const config::Config& config, const calibrate::PeerRanks& peers,
                    const std::atomic<bool>* interrupted,
                    const std::optional<schedule::Rates>& given) {
  PlanRequest request = {.config = config,
                         .model = inputs::model_of(config),
                         .world = peers.world,
                         .interrupted = interrupted};
  request.budgets = budgets_here(config, given.value_or(schedule::Rates{}));
  require_fit(request);
  if (given) {
    request.rates = *given;
    // Rates of a GPU would be taken for rates without shared cores.
    request.kernels = [config, model = request.model](model::MicroBatchShape shape) {
      const std::string_view kind =
          device::kind_of({.kind = config.ballast.device, .type = config.type});
      return model::kernel_memory(model, config.type, shape, kind, config.ballast.compute_threads);
    };
  } else {
    request.rates = calibrate::machine_rates(measured_config(request), request.model, false,
                                             interrupted, {.beside_ranks = peers.world > 1});
    if (peers.world > 1) calibrate::share_out(request.rates, peers);
  }
  Decision decision = decide(request);
  const config::BatchSection& batch = decision.config.batch;
  const schedule::Options& options = decision.blueprint.options;
  log(LogLevel::info,
      fmt::format(
          "planner: {} plans simulated; {} micro-batch{} of {}, {} buffer{} for weights and "
          "{} for optimizer states, {:.3g} s per step predicted",
          decision.simulated, batch.accumulation, batch.accumulation == 1 ? "" : "es",
          batch.micro_batch, options.weight_staging, options.weight_staging == 1 ? "" : "s",
          options.state_staging, decision.prediction.step_seconds));
  request.interrupted = nullptr;  // the advice at the end of the run is no longer planning
  return {std::move(decision), std::move(request), given};
}

/// The config and rates of `source`: those of a saved plan, or `config` and the rates of a file.
struct Sourced {
  config::Config config;
  std::optional<schedule::Rates> rates;
};

Sourced read_source(const PlanSource& source, const config::Config& config, std::uint32_t world) {
  Sourced sourced = {config, std::nullopt};
  if (!source.plan.empty()) {
    AppliedPlan plan = read_plan(source.plan, config, world);
    log(LogLevel::info, fmt::format("planner: the saved plan {}", source.plan.string()));
    sourced.config = std::move(plan.config);
    sourced.rates = std::move(plan.rates);
  } else if (!source.rates.empty()) {
    sourced.rates = calibrate::load_rates(source.rates);
  }
  return sourced;
}

RunPlan plan_alone(const config::Config& config, const std::atomic<bool>* interrupted,
                   const PlanSource& source) {
  Sourced sourced = read_source(source, config, 1);
  if (leaves_choices(sourced.config)) {
    return decide_open(sourced.config, {}, interrupted, sourced.rates);
  }
  RunPlan plan;
  plan.decision.blueprint = draw_blueprint(sourced.config);
  plan.decision.config = std::move(sourced.config);
  plan.given_rates = std::move(sourced.rates);
  return plan;
}

/// Every rank draws its blueprint from the config that rank 0 decides.
RunPlan plan_together(const config::Config& config, comm::Ranks& ranks,
                      const std::atomic<bool>* interrupted, const PlanSource& source) {
  const calibrate::MachineShare share = find_share(ranks, config);
  const bool first = ranks.rank() == 0;
  const auto& launch = ranks.launch();
  std::future<RunPlan> decided;
  Sourced sourced = {config, std::nullopt};
  comm::collective_try(&ranks, [&] {
    if (first) sourced = read_source(source, config, launch.world);
  });
  config::Config shared = std::move(sourced.config);
  calibrate::apply_common_share(shared, share);
  const bool open = !ranks.broadcast(leaves_choices(shared) ? "open" : "").empty();
  if (open) {
    const calibrate::PeerRanks peers = {.world = launch.world,
                                        .local_world = launch.local_world,
                                        .sharing = static_cast<std::uint32_t>(share.sharing),
                                        .received_per_second = measure_exchange(ranks)};
    config::Config own = shared;
    calibrate::apply_own_share(own, share);
    if (first) {
      decided = std::async(std::launch::async, [own, peers, interrupted, given = sourced.rates] {
        return decide_open(own, peers, interrupted, given);
      });
    }
    wait_for_first(ranks, decided, config.ballast.comm_timeout_seconds);
  }
  if (!open && shared.ballast.order == "auto") {
    // All ranks exchange data in the order of rank 0, whatever memory each of them has.
    config::Config own = shared;
    calibrate::apply_own_share(own, share);
    comm::collective_try(&ranks, [&] {
      shared.ballast.order = inputs::name_of(draw_blueprint(own, &ranks).options.order);
    });
  }
  RunPlan plan;
  std::string text;
  comm::collective_try(&ranks, [&] {
    if (!first) return;
    if (open) {
      plan = decided.get();
      const config::BallastSection named = shared.ballast;
      shared = plan.decision.config;
      shared.ballast.update_threads = named.update_threads;
      shared.ballast.update_numa_node = named.update_numa_node;
    }
    text = config::print(shared);
  });
  shared = config::parse(ranks.broadcast(text), "/", "the config of rank 0", {}, launch.world);
  calibrate::apply_own_share(shared, share);
  comm::collective_try(&ranks, [&] { plan.decision.blueprint = draw_blueprint(shared, &ranks); });
  plan.decision.config = std::move(shared);
  return plan;
}

}  // namespace

RunPlan plan_run(const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* interrupted, const PlanSource& source) {
  return ranks == nullptr || ranks->world() == 1
             ? plan_alone(config, interrupted, source)
             : plan_together(config, *ranks, interrupted, source);
}

}  // namespace ballast::planner
