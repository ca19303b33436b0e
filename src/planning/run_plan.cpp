#include "ballast/planning/run_plan.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/together.h"
#include "ballast/core/log.h"
#include "ballast/planning/engine_inputs.h"
#include "ballast/planning/forecast.h"
#include "ballast/planning/machine_rates.h"

#include "src/planning/engine_inputs.h"
#include "src/planning/machine_share.h"

namespace ballast::planning {
namespace {

using Clock = std::chrono::steady_clock;

MachineShare find_share(comm::Ranks& ranks, const config::Config& config) {
  const RankPlace mine = read_place(ranks.launch(), config);
  std::vector<RankPlace> all(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return share_of(all, ranks.rank());
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

/// Decides a config that leaves choices; with `peers`, its budgets and threads are one rank's.
RunPlan decide_open(const config::Config& config, const PeerRanks& peers,
                    const std::atomic<bool>* interrupted) {
  PlanRequest request = {.config = config,
                         .model = model_of(config),
                         .world = peers.world,
                         .interrupted = interrupted};
  request.budgets = budgets_of(config, {});
  require_fit(request);
  request.rates = machine_rates(measured_config(request), request.model, false, interrupted);
  if (peers.world > 1) share_out(request.rates, peers);
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
  return {std::move(decision), std::move(request)};
}

RunPlan plan_alone(const config::Config& config, const std::atomic<bool>* interrupted) {
  if (leaves_choices(config)) return decide_open(config, {}, interrupted);
  return {.decision = {.config = config, .blueprint = draw_blueprint(config)}};
}

/// Every rank draws its blueprint from the config that rank 0 decides.
RunPlan plan_together(const config::Config& config, comm::Ranks& ranks,
                      const std::atomic<bool>* interrupted) {
  const MachineShare share = find_share(ranks, config);
  const bool first = ranks.rank() == 0;
  const auto& launch = ranks.launch();
  std::future<RunPlan> decided;
  config::Config shared = config;
  apply_common_share(shared, share);
  const bool open = !ranks.broadcast(leaves_choices(shared) ? "open" : "").empty();
  if (open) {
    const PeerRanks peers = {.world = launch.world,
                             .local_world = launch.local_world,
                             .sharing = static_cast<std::uint32_t>(share.sharing),
                             .received_per_second = measure_exchange(ranks)};
    config::Config own = shared;
    apply_own_share(own, share);
    if (first) {
      decided =
          std::async(std::launch::async, [=] { return decide_open(own, peers, interrupted); });
    }
    wait_for_first(ranks, decided, config.ballast.comm_timeout_seconds);
  }
  RunPlan plan;
  std::string text;
  comm::together(&ranks, [&] {
    if (!first) return;
    if (open) {
      plan = decided.get();
      const config::BallastSection named = shared.ballast;
      shared = plan.decision.config;
      shared.ballast.update_threads = named.update_threads;
      shared.ballast.update_numa_node = named.update_numa_node;
    } else if (shared.ballast.order == "auto") {
      // All ranks exchange data in one order, whatever memory each of them has.
      config::Config own = shared;
      apply_own_share(own, share);
      shared.ballast.order = name_of(draw_blueprint(own, &ranks).options.order);
    }
    text = config::print(shared);
  });
  shared = config::parse(ranks.broadcast(text), "/", "the config of rank 0", {}, launch.world);
  apply_own_share(shared, share);
  comm::together(&ranks, [&] { plan.decision.blueprint = draw_blueprint(shared, &ranks); });
  plan.decision.config = std::move(shared);
  return plan;
}

}  // namespace

RunPlan plan_run(const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* interrupted) {
  return ranks == nullptr || ranks->world() == 1 ? plan_alone(config, interrupted)
                                                 : plan_together(config, *ranks, interrupted);
}

}  // namespace ballast::planning
