#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ballast/calibrate/calibrate.h"
#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/error.h"

#include "src/calibrate/kept_rates.h"

namespace ballast::calibrate {
namespace {

/// Maximum relative error of a prediction without a correction of rates.
constexpr double kCloseEnough = 0.05;
constexpr double kLargestSpread = 0.15;
constexpr double kLeastShare = 0.01;
constexpr double kLargestFactor = 16.0;

/// Returns the `share` quantile of `values`.
double at_share(std::vector<double> values, double share) {
  const auto at =
      values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// Returns the rates that determine how long `lane` is busy.
std::vector<double*> rates_of(plan::Rates& rates, plan::Lane lane) {
  std::vector<double*> found;
  switch (lane) {
    case plan::Lane::compute:
      for (plan::Curve* curve : {&rates.forward, &rates.backward, &rates.head}) {
        for (plan::CurvePoint& point : *curve) found.push_back(&point.flops_per_second);
      }
      for (plan::AttentionRate& rate : rates.attention) {
        found.insert(found.end(), {&rate.forward, &rate.backward});
      }
      found.insert(found.end(), {&rates.adapter_per_second, &rates.device_memory_per_second});
      return found;
    case plan::Lane::update:
      return {&rates.update_per_second};
    case plan::Lane::upload:
      return {&rates.upload_per_second};
    case plan::Lane::offload:
      return {&rates.offload_per_second};
    case plan::Lane::fetch:
      return {&rates.read_per_second};
    case plan::Lane::writeback:
      return {&rates.write_per_second};
    default:  // between ranks
      return {};
  }
}

}  // namespace

std::optional<MeasuredStep> typical_step(std::span<const MeasuredStep> steps) {
  if (steps.size() < kEnoughSteps) return std::nullopt;
  const auto quantile = [steps](double share, auto value) {
    std::vector<double> values;
    values.reserve(steps.size());
    for (const MeasuredStep& step : steps) values.push_back(value(step));
    return at_share(std::move(values), share);
  };
  const auto seconds = [](const MeasuredStep& step) { return step.seconds; };
  MeasuredStep typical;
  typical.seconds = quantile(0.5, seconds);
  const double spread = quantile(0.75, seconds) - quantile(0.25, seconds);
  if (spread > kLargestSpread * typical.seconds) return std::nullopt;
  for (std::size_t lane = 0; lane < plan::kLaneCount; ++lane) {
    typical.busy_seconds[lane] =
        quantile(0.5, [lane](const MeasuredStep& step) { return step.busy_seconds[lane]; });
  }
  return typical;
}

plan::Rates corrected(plan::Rates rates, const plan::Prediction& predicted,
                      const MeasuredStep& measured) {
  std::array<double, plan::kLaneCount> factors{};
  for (const plan::Lane lane : plan::kLanes) {
    const auto index = static_cast<std::size_t>(lane);
    const double expected = predicted.busy_seconds[index];
    const double factor = expected > 0.0 ? measured.busy_seconds[index] / expected : 0.0;
    const bool counts = expected >= kLeastShare * predicted.step_seconds;
    const bool sane = factor >= 1.0 / kLargestFactor && factor <= kLargestFactor;
    factors[index] = counts && sane ? factor : 1.0;
    for (double* rate : rates_of(rates, lane)) *rate /= factors[index];
  }
  // The mixed rate is corrected by the geometric mean of the reading and writing corrections.
  rates.mixed_per_second /= std::sqrt(factors[static_cast<std::size_t>(plan::Lane::fetch)] *
                                      factors[static_cast<std::size_t>(plan::Lane::writeback)]);
  return rates;
}

RunPrediction::RunPrediction(std::string key, plan::Rates rates, plan::Prediction prediction)
    : key_(std::move(key)), rates_(std::move(rates)), prediction_(std::move(prediction)) {}

std::optional<RunPrediction> RunPrediction::find(const config::Config& config,
                                                 const engine::Blueprint& blueprint,
                                                 const plan::Rates* given) {
  const config::BallastSection& ballast = config.ballast;
  if (blueprint.mesh.ranks() > 1 || ballast.serial || ballast.delay_seed) return std::nullopt;
  const std::string key = given == nullptr ? calibration_key(config, blueprint.model) : "";
  const std::optional<plan::Rates> rates =
      given == nullptr ? read_rates(key) : std::optional(*given);
  if (!rates) return std::nullopt;
  try {
    return RunPrediction(key, *rates, plan::simulate(blueprint.schedule, *rates));
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool RunPrediction::correct(const MeasuredStep& measured, double others_share) const {
  if (key_.empty() || others_share > kMuchOtherWork) return false;
  if (std::abs(step_seconds() / measured.seconds - 1.0) <= kCloseEnough) return false;
  plan::Rates better = corrected(rates_, prediction_, measured);
  ++better.corrections;
  better.other_work = others_share;
  return keep_rates(better, key_);
}

}  // namespace ballast::calibrate
