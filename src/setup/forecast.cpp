#include "ballast/setup/forecast.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/plan/lane_times.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

namespace ballast::setup {
namespace {

using plan::Lane;
using plan::Operation;

constexpr double kTerabyte = 1e12;

/// Formats "0.042", "3.1", "190", "12000".
std::string short_number(double value) {
  return value >= 9.95 ? fmt::format("{:.0f}", value) : fmt::format("{:.2g}", value);
}

std::string life(double days) {
  constexpr double kYear = 365.25;
  constexpr double kManyYears = 100.0;
  if (days >= kManyYears * kYear) return "more than 100 years";
  if (days >= 3.0 * kYear) return short_number(days / kYear) + " years";
  const std::string number = short_number(days);
  return number + (number == "1" ? " day" : " days");
}

/// Bytes that a step moves on some lanes independently of its tokens, and their time alone.
struct Load {
  Bytes bytes = 0;
  double seconds = 0.0;
};

/// Operations of a step that must be hidden by the computation between them.
using Operations = std::span<const Operation>;

/// Returns the first forward pass, the passes of further micro-batches, and the last backward pass
/// with the loss. Gated updates must end before the first forward pass reaches their blocks, and
/// updates in the backward pass begin only there, so each part hides only its own operations.
std::array<Operations, 3> parts_of(const plan::Plan& plan) {
  const Operations all = plan.operations;
  const std::size_t first = std::min<std::size_t>(plan.first_head, all.size());
  const std::size_t last = std::min<std::size_t>(plan.last_head, all.size());
  return {all.first(first), all.subspan(first, last - first), all.subspan(last)};
}

/// Returns the load of the device with most to do, since devices work at the same time.
Load fixed_load(Operations operations, const plan::Schedule& schedule, const plan::Rates& rates,
                std::initializer_list<Lane> lanes) {
  std::array<Load, plan::kMaxDevices> loads;
  for (const Operation& operation : operations) {
    if (std::find(lanes.begin(), lanes.end(), operation.lane) == lanes.end()) continue;
    const Bytes bytes = operation.lane == Lane::update ? operation.traffic : operation.bytes;
    if (bytes == 0 || operation.grows_with_batch()) continue;
    Load& load = loads.at(operation.device);
    load.bytes += bytes;
    load.seconds += seconds_alone(operation, schedule, rates);
  }
  return *std::max_element(loads.begin(), loads.end(), [](const Load& one, const Load& other) {
    return one.seconds < other.seconds;
  });
}

/// NVMe reads and writes share the drives.
Load nvme_load(Operations operations, const plan::Schedule& schedule, const plan::Rates& rates) {
  const Load read = fixed_load(operations, schedule, rates, {Lane::fetch});
  const Load written = fixed_load(operations, schedule, rates, {Lane::writeback});
  Load both = {read.bytes + written.bytes, read.seconds + written.seconds};
  if (read.bytes > 0 && written.bytes > 0 && rates.mixed_per_second > 0.0) {
    both.seconds = static_cast<double>(both.bytes) / rates.mixed_per_second;
  }
  return both;
}

/// The slower direction of the link, which works in both directions at once.
Load link_load(Operations operations, const plan::Schedule& schedule, const plan::Rates& rates) {
  const Load up = fixed_load(operations, schedule, rates, {Lane::upload});
  const Load down = fixed_load(operations, schedule, rates, {Lane::offload});
  return up.seconds > down.seconds ? up : down;
}

/// Returns the mean of the devices.
double compute_seconds(Operations operations, const plan::Schedule& schedule,
                       const plan::Rates& rates) {
  double seconds = 0.0;
  for (const Operation& operation : operations) {
    if (operation.lane == Lane::compute) seconds += seconds_in_turn(operation, schedule, rates);
  }
  return seconds / schedule.devices;
}

}  // namespace

std::vector<HidingPoint> find_hiding_points(const engine::Blueprint& blueprint,
                                            const plan::Prediction& prediction,
                                            const plan::Rates& rates) {
  const plan::Schedule& all = blueprint.schedule;
  const plan::Plan& step = all.steady;
  const auto parameters = static_cast<double>(blueprint.model.parameters());
  const auto tokens = static_cast<double>(blueprint.tokens_per_step());
  // Other work on shared cores slows computation down.
  const double alone = compute_seconds(step.operations, all, rates);
  const double slowdown =
      alone > 0.0 ? prediction.busy_seconds.at(static_cast<std::size_t>(Lane::compute)) / alone
                  : 0.0;
  std::vector<HidingPoint> points;
  const auto add = [&](const char* what, auto load_of) {
    double most = 0.0;
    for (const Operations& part : parts_of(step)) {
      const Load load = load_of(part);
      const double compute = slowdown * compute_seconds(part, all, rates);
      if (load.bytes == 0 || load.seconds <= 0.0 || compute <= 0.0) continue;
      const double achieved = plan::kFlopsPerParameterAndToken * parameters * tokens / compute;
      const auto bytes = static_cast<double>(load.bytes);
      most =
          std::max(most, plan::tokens_to_hide(bytes / parameters, achieved, bytes / load.seconds));
    }
    if (most > 0.0) points.push_back({what, most * all.ranks});
  };
  add("NVMe", [&](Operations part) { return nvme_load(part, all, rates); });
  add("update", [&](Operations part) { return fixed_load(part, all, rates, {Lane::update}); });
  add("link", [&](Operations part) { return link_load(part, all, rates); });
  add("network", [&](Operations part) {
    return fixed_load(part, all, rates, {Lane::gather, Lane::reduce});
  });
  std::stable_sort(points.begin(), points.end(),
                   [](const HidingPoint& a, const HidingPoint& b) { return a.tokens > b.tokens; });
  return points;
}

namespace {

/// Wear of the drives of one machine. The endurance in `rates` is for all drives of a rank; without
/// it each swap directory counts as a drive, which ranks may share.
std::optional<Wear> find_wear(const config::Config& config, const plan::Rates& rates,
                              std::uint32_t world, Bytes written, double seconds) {
  const std::uint32_t ranks = std::min<std::uint32_t>(world, rates.ranks_per_node);
  if (rates.drive_writes_bytes > 0.0) {
    return estimate_wear(std::vector<Bytes>(ranks, written), seconds, rates.drive_writes_bytes);
  }
  return estimate_wear(written_by_machine(config, ranks, std::vector<Bytes>{written}), seconds);
}

}  // namespace

std::optional<Wear> estimate_wear(std::span<const Bytes> written, double seconds,
                                  double rated_bytes) {
  constexpr double kDay = 86400.0;
  const Bytes all = std::accumulate(written.begin(), written.end(), Bytes{0});
  if (all == 0 || !(seconds > 0.0)) return std::nullopt;
  const auto most = static_cast<double>(*std::max_element(written.begin(), written.end()));
  return Wear{static_cast<double>(all) / seconds * kDay / kTerabyte,
              rated_bytes / (most / seconds * kDay), rated_bytes};
}

std::string describe(const Wear& wear) {
  return fmt::format("{} TB a day at this pace: a drive rated {:.0f} TBW lasts {}",
                     short_number(wear.terabytes_per_day), wear.rated_bytes / kTerabyte,
                     life(wear.days));
}

std::string describe_writes(const Wear& wear) {
  if (wear.terabytes_per_day <= 0.0) return "nothing is written to NVMe";
  return fmt::format("{} TB a day to NVMe, a drive lasts {}", short_number(wear.terabytes_per_day),
                     life(wear.days));
}

bool Forecast::bandwidth_run() const {
  const plan::Prediction& step = decision.prediction;
  return !plan::find_bottleneck(step.busy_seconds, step.step_seconds).bound_by_compute();
}

memory::Budgets budgets_of(const config::Config& config, const plan::Rates& rates,
                           std::uint32_t world) {
  const auto first = [](Bytes named, Bytes rated) { return named > 0 ? named : rated; };
  Bytes rated = rates.device_bytes;
  if (rates.shared_cores == 0) {
    rated -= memory::channel_reserve(rated, channels_per_device(config, world));
  }
  const memory::Budgets requested = {first(config.ballast.device_bytes, rated),
                                     first(config.ballast.host_bytes, rates.host_bytes)};
  return resolve_budgets(config, requested, memory::available_memory(), world);
}

planner::PlanRequest request_for(const config::Config& config, const plan::Rates& rates,
                                 std::uint32_t world, const std::atomic<bool>* interrupted) {
  planner::PlanRequest request = plan_request(config, world);
  request.budgets = budgets_of(config, rates, world);
  request.rates = rates;
  const engine::DeviceRequest& devices = request.run.devices;
  const bool rated = devices.listed == 0 && rates.devices > 0;
  request.devices = rated ? std::min<std::uint32_t>(rates.devices, plan::kMaxDevices)
                          : engine::available_devices(devices);
  request.interrupted = interrupted;
  return request;
}

Forecast make_forecast(const config::Config& config, const plan::Rates& rates, std::uint32_t world,
                       const std::atomic<bool>* interrupted) {
  plan::require_exchange_rates(rates, world);
  const planner::PlanRequest request = request_for(config, rates, world, interrupted);
  Forecast forecast;
  forecast.rates = rates;
  forecast.decision = planner::decide(request);
  forecast.config = settle(config, forecast.decision.blueprint);
  const planner::Decision& decision = forecast.decision;
  const double seconds = decision.prediction.step_seconds;
  forecast.tokens_per_second =
      static_cast<double>(decision.blueprint.problem.tokens_per_step()) / seconds;
  forecast.nvme_bytes_written = decision.blueprint.schedule.steady.bytes_on(Lane::writeback);
  forecast.wear = find_wear(forecast.config, rates, world, forecast.nvme_bytes_written, seconds);
  forecast.hiding = find_hiding_points(decision.blueprint, decision.prediction, rates);
  forecast.improvements =
      planner::find_improvements(decision.blueprint, decision.prediction, request);
  return forecast;
}

}  // namespace ballast::setup
