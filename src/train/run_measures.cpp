#include "src/train/run_measures.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"

namespace ballast::train {
namespace {

/// Computes how evenly the routers have used the experts.
std::optional<StepMetrics::Experts> measure_experts(const engine::StepResult& result) {
  if (result.expert_rows.empty()) return std::nullopt;
  StepMetrics::Experts found = {.balance_loss = result.balance_loss,
                                .router_z_loss = result.router_z_loss};
  for (const std::vector<std::uint64_t>& layer : result.expert_rows) {
    std::uint64_t all = 0;
    std::uint64_t most = 0;
    for (const std::uint64_t rows : layer) {
      all += rows;
      most = std::max(most, rows);
      found.idle += rows == 0 ? 1 : 0;
    }
    found.largest_load =
        std::max(found.largest_load, static_cast<double>(most * layer.size()) /
                                         static_cast<double>(std::max<std::uint64_t>(all, 1)));
  }
  return found;
}

}  // namespace

double seconds_to_measure(const engine::Blueprint& blueprint, std::uint64_t steps) {
  constexpr double kSlowDevice = 1e12;  // FLOP/s
  const double flops = blueprint.flops_per_step() * static_cast<double>(steps);
  return std::clamp(flops / kSlowDevice, 0.02, 0.3);
}

void RunMeasures::begin() {
  filled_ = engine_.totals().nvme_bytes_by_path;
  started_ = std::chrono::steady_clock::now();
  go_on();
  watch_ = CpuWatch();
}

void RunMeasures::go_on() {
  last_step_end_ = std::chrono::steady_clock::now();
  before_ = engine_.totals();
}

double RunMeasures::seconds_so_far() const {
  return seconds_since(started_);
}

StepMetrics RunMeasures::step(const data::Batch& batch, const engine::StepResult& result,
                              double rate) {
  StepMetrics metrics;
  add_lanes(metrics);  // before the clock is read, so that no lane is busy for longer than the step
  metrics.step = batch.step;
  if (result.targets > 0) metrics.loss = result.loss;
  metrics.lr = rate;
  metrics.grad_norm = result.grad_norm;
  metrics.skipped = result.skipped;
  metrics.rolled_back = result.rolled_back;
  metrics.tokens = batch.real_tokens;
  metrics.step_seconds = seconds_since(last_step_end_);
  metrics.tokens_per_second = static_cast<double>(metrics.tokens) / metrics.step_seconds;
  metrics.experts = measure_experts(result);
  if (engine_.blueprint().pairs && metrics.loss) {
    metrics.rewards = {.chosen = result.pairs.chosen,
                       .rejected = result.pairs.rejected,
                       .accuracy = result.pairs.correct};
  }
  ++count_;
  tokens_ += batch.real_tokens;
  training_seconds_ += metrics.step_seconds;
  skipped_ += result.skipped ? 1 : 0;
  rolled_back_ += result.rolled_back ? 1 : 0;
  last_loss_ = metrics.loss;
  last_rewards_ = metrics.rewards;
  // Plans of steps without speculation have other times than the one that was simulated.
  if (result.paused) settled_steps_ = 0;
  note(metrics);
  if (!metrics.loss) note_without_targets(metrics.step);
  return metrics;
}

/// Only the first such step has a warning. The end of the run has the number of steps.
void RunMeasures::note_without_targets(std::uint64_t step) {
  if (without_targets_++ > 0 || engine_.blueprint().mesh.rank != 0) return;
  log(LogLevel::warning,
      fmt::format("step {}: no token of its batch is trained on, so the step has no loss and its "
                  "gradient is zero; leave out documents without targets, or use a larger "
                  "train_batch_size",
                  step));
}

void RunMeasures::add_lanes(StepMetrics& metrics) {
  const engine::EngineTotals totals = engine_.totals();
  for (const plan::Lane lane : plan::lanes_of(engine_.blueprint().problem.devices)) {
    const auto i = static_cast<std::size_t>(lane);
    const std::string name(to_string(lane));
    metrics.busy_seconds[name] = totals.lanes.busy_seconds[i] - before_.lanes.busy_seconds[i];
    metrics.stalled_seconds[name] =
        totals.lanes.stalled_seconds[i] - before_.lanes.stalled_seconds[i];
    metrics.bytes[name] = totals.lanes.bytes[i] - before_.lanes.bytes[i];
  }
  for (const Tier tier : kTiers) {
    metrics.peak_bytes[std::string(to_string(tier))] =
        totals.allocated[static_cast<std::size_t>(tier)];
  }
  metrics.nvme_bytes_written = totals.nvme_bytes_written();
  if (engine_.blueprint().problem.devices > 1) add_devices(metrics, totals);
}

/// Each device has its own memory and its own budget.
void RunMeasures::add_devices(StepMetrics& metrics, const engine::EngineTotals& totals) const {
  metrics.devices.resize(engine_.blueprint().problem.devices);
  for (std::size_t number = 0; number < plan::lane_count(metrics.devices.size()); ++number) {
    const auto [lane, device] = plan::lane_at(number);
    if (!is_per_device(lane)) continue;
    const std::string name(to_string(lane));
    metrics.devices[device].busy_seconds[name] =
        totals.lanes.busy_by_device[number] - before_.lanes.busy_by_device[number];
    metrics.devices[device].stalled_seconds[name] =
        totals.lanes.stalled_by_device[number] - before_.lanes.stalled_by_device[number];
  }
  Bytes most = 0;
  for (std::size_t d = 0; d < metrics.devices.size(); ++d) {
    metrics.devices[d].peak_bytes = totals.allocated_on_device.at(d);
    most = std::max(most, metrics.devices[d].peak_bytes);
  }
  metrics.peak_bytes[std::string(to_string(Tier::device))] = most;
}

/// Records the step's time for typical_step(). Skips steps that fill the pipeline: at the start,
/// after each wait for all updates or rollback, and while speculation pauses.
void RunMeasures::note(const StepMetrics& metrics) {
  constexpr std::uint64_t kUnsettled = 2;
  constexpr std::size_t kMax = 1000;
  if (metrics.rolled_back) settled_steps_ = 0;
  if (settled_steps_++ < kUnsettled || steps_.size() == kMax) return;
  calibrate::MeasuredStep step = {.seconds = metrics.step_seconds};
  for (const plan::Lane lane : plan::lanes_of(engine_.blueprint().problem.devices)) {
    step.busy_seconds[static_cast<std::size_t>(lane)] =
        metrics.busy_seconds.at(std::string(to_string(lane)));
  }
  steps_.push_back(step);
}

/// Rate and peak are per rank.
double RunMeasures::gemm_share(double step_seconds) {
  if (step_seconds <= 0.0) return 0.0;
  return gemm_peak_.share_of(engine_.blueprint().flops_per_step() / step_seconds);
}

double RunMeasures::pace() const {
  return training_seconds_ / std::max(static_cast<double>(count_), 1.0);
}

std::vector<Bytes> RunMeasures::written() const {
  std::vector<Bytes> bytes = engine_.totals().nvme_bytes_by_path;
  for (std::size_t p = 0; p < filled_.size() && p < bytes.size(); ++p) bytes[p] -= filled_[p];
  return bytes;
}

void RunMeasures::summarize(RunSummary& summary, const calibrate::RunPrediction* prediction) {
  const auto typical = calibrate::typical_step(steps_);
  summary.skipped = skipped_;
  summary.rolled_back = rolled_back_;
  summary.seconds = ended() ? seconds_ : seconds_so_far();
  summary.training_seconds = training_seconds_;
  summary.tokens_per_second = static_cast<double>(tokens_) / std::max(training_seconds_, 1e-9);
  summary.gemm_share = gemm_share(pace());
  summary.step_seconds = typical ? typical->seconds : pace();
  summary.last_loss = last_loss_;
  summary.last_rewards = last_rewards_;
  summary.without_targets = without_targets_;
  summary.totals = engine_.totals();
  if (prediction == nullptr) return;
  summary.predicted_seconds = prediction->step_seconds();
  summary.corrected_rates = typical && prediction->correct(*typical, watch_.others_share());
}

std::string RunMeasures::advice(const plan::LaneTotals& lanes, const setup::RunPlan& plan,
                                bool interrupted) const {
  std::function<std::vector<planner::Improvement>()> improvements;
  if (plan.request && !interrupted) {
    improvements = [&] {
      return planner::find_improvements(engine_.blueprint(), plan.decision.prediction,
                                        *plan.request);
    };
  }
  return planner::advise(engine_.blueprint(), lanes, busy_seconds(), improvements);
}

}  // namespace ballast::train
