#include "ballast/calibrate/machine_rates.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/calibrate/calibrate.h"
#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/device/device.h"

namespace ballast::calibrate {

namespace {

constexpr std::string_view kName = "this machine";

/// Returns whether the measurement of `rates` was undisturbed.
bool is_undisturbed(const plan::Rates& rates) {
  return rates.other_work <= kMuchOtherWork;
}

/// Returns whether `rates` has everything that a calibration for `run` measures on a quiet
/// machine.
bool is_complete(const engine::RunInputs& run, const plan::Rates& rates) {
  for (const CalibrationPart part : kParts) {
    if (!has_part(rates, part) && (part != CalibrationPart::swap || run.constraints.may_swap()))
      return false;
  }
  if (rates.shared_cores == 0) return true;
  const bool swaps = has_part(rates, CalibrationPart::swap);
  return rates.compute_beside_copy > 0.0 &&
         (!swaps || (rates.io_beside_compute > 0.0 && rates.io_beside_update > 0.0));
}

/// Current other work on the CPUs, and its effect on step times.
struct OtherWork {
  double cpus = 0.0;
  int all = 1;           ///< number of CPUs that this process may use
  bool computes = true;  ///< whether the CPUs compute, not a GPU
  bool ranks = false;    ///< see RatesSource

  [[nodiscard]] bool busy() const { return cpus > kMuchOtherWork * all; }
  /// Each busy CPU has at least one thread that takes half of it from a thread of a run. A team of
  /// threads is as slow as its slowest one.
  [[nodiscard]] std::string cost() const {
    const std::string what = fmt::format("other work keeps {:.1f} of {} CPUs busy", cpus, all);
    if (ranks) return "other ranks wait on the same CPUs";
    if (!computes) return what + ", so updates and transfers may be slower than predicted";
    return what + fmt::format(", so steps may take about {:.2g} times as long as predicted",
                              1.0 + std::min(1.0, cpus / all));
  }
};

/// The rates of one run on this machine: cached, partly cached, or new.
class MachineRates {
 public:
  MachineRates(const engine::RunInputs& run, const RatesSource& source)
      : run_(run), source_(source), key_(calibration_key(run)), kept_(read_rates(key_)) {
    other_.cpus = source.others_cpus();
    other_.all = usable_cpus();
    other_.ranks = source.beside_ranks;
    other_.computes = device::shares_host_cores(run.devices.first());
  }

  /// Returns the cached rates, unless a measurement now would be better.
  std::optional<plan::Rates> kept() const {
    if (!kept_) return std::nullopt;
    if (!other_.busy()) {
      return is_undisturbed(*kept_) && is_complete(run_, *kept_) ? kept_ : std::nullopt;
    }
    log(other_.ranks ? LogLevel::debug : LogLevel::info,
        fmt::format("rates: {}; using the rates of this machine {}", other_.cost(),
                    origin(*kept_)));
    return kept_;
  }

  plan::Rates measure(bool all, const std::atomic<bool>* interrupted) {
    CalibrationStart start = {.busy = other_.busy()};
    if (!all) find_known(start.known);
    announce(start.known);
    Calibration measured = source_.measure(run_, interrupted, start);
    const double now = source_.now();
    plan::Rates& rates = measured.rates;
    rates.other_work = std::max(rates.other_work, start.known.other_work);
    rates.spread = std::max(rates.spread, start.known.spread);
    rates.measured_at = now;
    for (const CalibrationPart part : kParts) {
      if (has_part(rates, part) && !has_part(start.known, part)) keep_part(part, measured, now);
    }
    if (replaces(rates, kept_ ? &*kept_ : nullptr)) {
      keep_rates(rates, key_);
    } else {
      log(LogLevel::info,
          fmt::format("rates: later runs use those {}, which less other work disturbed",
                      origin(*kept_)));
    }
    return std::move(rates);
  }

 private:
  /// Returns "that were measured 3 hours ago (FILE)".
  [[nodiscard]] std::string origin(const plan::Rates& rates) const {
    const std::string age = rates.measured_at > 0.0
                                ? describe_age(source_.now() - rates.measured_at) + " ago"
                                : "earlier";
    const std::string spread = describe_spread(rates);
    return fmt::format("that were measured {} ({}{}{})", age, rates_cache_file(key_).string(),
                       spread.empty() ? "" : "; ", spread);
  }

  /// Finds rates that need no measurement: undisturbed ones, and on a busy machine all cached ones.
  void find_known(plan::Rates& known) const {
    if (kept_ && is_undisturbed(*kept_)) {
      known = *kept_;
      return;
    }
    for (const CalibrationPart part : kParts) {
      const auto found = read_rates(part_key(part, run_));
      if (!found || !(other_.busy() || is_undisturbed(*found))) continue;
      copy_part(part, *found, known);
      known.other_work = std::max(known.other_work, found->other_work);
      known.spread = std::max(known.spread, found->spread);
    }
  }

  void announce(const plan::Rates& known) const {
    std::vector<std::string_view> parts;
    for (const CalibrationPart part : kParts) {
      if (!has_part(known, part) &&
          (part != CalibrationPart::swap || run_.constraints.may_swap())) {
        parts.push_back(to_string(part));
      }
    }
    std::string line = "rates: measuring this machine";
    if (!parts.empty() && known != plan::Rates{}) {
      line += fmt::format(" ({}; the rest is known)", fmt::join(parts, ", "));
    }
    line += ", which takes a few seconds";
    if (other_.busy())
      line += fmt::format("; {}, and the rates are corrected for it", other_.cost());
    log(LogLevel::info, line);
  }

  void keep_part(CalibrationPart part, const Calibration& measured, double now) const {
    plan::Rates rates;
    copy_part(part, measured.rates, rates);
    rates.other_work = measured.other_work[static_cast<std::size_t>(part)];
    rates.spread = measured.spread[static_cast<std::size_t>(part)];
    rates.measured_at = now;
    const std::string key = part_key(part, run_);
    const auto before = read_rates(key);
    if (replaces(rates, before ? &*before : nullptr)) keep_rates(rates, key);
  }

  const engine::RunInputs& run_;
  const RatesSource& source_;
  std::string key_;
  std::optional<plan::Rates> kept_;
  OtherWork other_;
};

}  // namespace

double others_cpus_now() {
  constexpr std::chrono::milliseconds kWatched(60);
  const CpuWatch watch;
  std::this_thread::sleep_for(kWatched);
  return watch.others_cpus();
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::optional<plan::Rates> read_rates(const std::string& key) {
  return read_kept(rates_cache_file(key), "rates: cannot use the cached rates, measuring again",
                   [&](const std::filesystem::path& path) -> std::optional<plan::Rates> {
                     plan::Rates rates = load_rates(path);
                     if (rates.name != key) return std::nullopt;
                     rates.name = kName;
                     return rates;
                   });
}

bool keep_rates(plan::Rates rates, const std::string& key) {
  const std::filesystem::path file = rates_cache_file(key);
  if (file.empty()) return false;
  rates.name = key;
  try {
    make_machine_folder(file);
    save_rates(file, rates);
    return true;
  } catch (const Error& error) {
    log(LogLevel::warning,
        fmt::format("rates: cannot cache the rates for later runs: {}", error.what()));
    return false;
  }
}

bool replaces(const plan::Rates& fresh, const plan::Rates* kept) {
  return kept == nullptr || fresh.other_work <= std::max(kMuchOtherWork, kept->other_work);
}

std::string describe_age(double seconds) {
  constexpr std::array<std::pair<double, std::string_view>, 3> kUnits = {
      std::pair{86400.0, "day"}, std::pair{3600.0, "hour"}, std::pair{60.0, "minute"}};
  for (const auto& [length, unit] : kUnits) {
    const auto count = static_cast<long>(seconds / length);
    if (count > 0) return fmt::format("{} {}{}", count, unit, count == 1 ? "" : "s");
  }
  return fmt::format("{:.0f} s", std::max(0.0, seconds));
}

std::string describe_spread(const plan::Rates& rates) {
  if (!(rates.spread > 0.0)) return "";
  return fmt::format("repetitions of a measurement differed by up to {:.0f}%",
                     std::ceil(100.0 * rates.spread));
}

std::filesystem::path rates_cache_file(const std::string& key) {
  return machine_file("rates", key);
}

plan::Rates machine_rates(const engine::RunInputs& run, bool recalibrate,
                          const std::atomic<bool>* interrupted, const RatesSource& source) {
  MachineRates rates(run, source);
  if (!recalibrate) {
    if (auto kept = rates.kept()) return *std::move(kept);
  }
  return rates.measure(recalibrate, interrupted);
}

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

std::optional<RunPrediction> RunPrediction::find(const engine::RunInputs& asked,
                                                 const engine::Blueprint& blueprint,
                                                 const plan::Rates* given) {
  if (blueprint.mesh.ranks() > 1 || asked.delays) return std::nullopt;
  engine::RunInputs run = asked;
  run.model = blueprint.model;
  const std::string key = given == nullptr ? calibration_key(run) : "";
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
