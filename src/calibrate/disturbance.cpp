#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/calibrate.h"
#include "ballast/core/clocks.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {

namespace {

/// Minimum result, so that rates stay finite.
constexpr double kShortest = 1e-9;

/// Returns the `share` quantile of `values`, which it sorts.
double sorted_quantile(std::vector<double>& values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(
      std::lround(share * static_cast<double>(values.size() - 1)))];
}

/// Mean of `values` up to `most`.
double mean_up_to(std::vector<double> values, double most) {
  std::erase_if(values, [most](double value) { return value > most; });
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Returns the wall times of the slices that have not waited, or of all if these are too few.
std::vector<double> clean_times(std::span<const Slice> slices) {
  constexpr double kMaxWaiting = 0.02;
  constexpr std::size_t kEnough = 3;
  std::vector<double> all;
  std::vector<double> clean;
  for (const Slice& slice : slices) {
    all.push_back(slice.wall);
    if (slice.waited <= kMaxWaiting * slice.wall) clean.push_back(slice.wall);
  }
  return clean.size() >= std::min(kEnough, all.size()) ? clean : all;
}

double corrected_seconds(const Slice& slice, double cpus) {
  if (cpus <= 0.0) return slice.wall;
  const double seconds = std::min(slice.wall, slice.cpu / cpus);
  return cpus > 1.0 ? seconds : std::max(seconds, slice.wall - slice.waited);
}

}  // namespace

SliceEstimate undisturbed_time(std::span<const Slice> slices, const SliceConditions& conditions) {
  if (slices.empty()) return {kShortest, 0.0};
  constexpr double kJitter = 1.1;
  const bool elsewhere = conditions.cpus <= 0.0;
  std::vector<double> times;
  double seconds = 0.0;
  if (conditions.busy) {
    for (const Slice& slice : slices) times.push_back(corrected_seconds(slice, conditions.cpus));
    seconds = sorted_quantile(times, elsewhere ? 0.25 : 0.0);
  } else {
    times = clean_times(slices);
    seconds = mean_up_to(times, elsewhere ? 2.0 * sorted_quantile(times, 0.5)
                                          : kJitter * sorted_quantile(times, 0.0));
  }
  seconds = std::max(kShortest, seconds);
  return {seconds, std::max(0.0, sorted_quantile(times, 0.5) / seconds - 1.0)};
}

SliceClock::Waits SliceClock::read_waits() {
  Waits waits;
  std::error_code failure;
  std::filesystem::directory_iterator task("/proc/self/task", failure);
  for (; !failure && task != std::filesystem::directory_iterator(); task.increment(failure)) {
    std::ifstream file(task->path() / "schedstat");
    double ran = 0.0;
    double waited = 0.0;
    if (file >> ran >> waited) waits[task->path().filename().string()] = 1e-9 * waited;
  }
  return waits;
}

void SliceClock::start() {
  waits_ = read_waits();
  cpu_ = process_cpu_seconds();
  start_ = std::chrono::steady_clock::now();
}

Slice SliceClock::stop() {
  Slice slice = {.wall = seconds_since(start_), .cpu = process_cpu_seconds() - cpu_};
  for (const auto& [thread, waited] : read_waits()) {
    const auto before = waits_.find(thread);
    const double now = waited - (before == waits_.end() ? 0.0 : before->second);
    slice.waited += now;
  }
  return slice;
}

namespace {

/// Larger micro-batches may lose up to this share of the rate to caches.
constexpr double kLeastKept = 0.5;
/// More tokens take at least this share of the time that fewer tokens take.
constexpr double kLeastTime = 0.7;

/// Describes how `curve` contradicts itself; "" if it does not.
std::string contradiction(std::string_view kernels, const plan::Curve& curve) {
  for (std::size_t i = 1; i < curve.size(); ++i) {
    const plan::CurvePoint& less = curve[i - 1];
    const plan::CurvePoint& more = curve[i];
    const double kept = more.flops_per_second / less.flops_per_second;
    const double time = more.tokens / less.tokens / kept;
    if (kept >= kLeastKept && time >= kLeastTime) continue;
    return fmt::format("the {} rate went from {:.3g} to {:.3g} TFLOP/s between {} and {} tokens",
                       kernels, 1e-12 * less.flops_per_second, 1e-12 * more.flops_per_second,
                       less.tokens, more.tokens);
  }
  return "";
}

std::string disturbance_of(const Attempt& attempt) {
  if (attempt.others_share > kMuchOtherWork) {
    return fmt::format("other work used {:.0f}% of the CPU time", 100.0 * attempt.others_share);
  }
  for (const auto& [kernels, curve] :
       {std::pair{"forward", &attempt.rates.forward},
        std::pair{"backward", &attempt.rates.backward}, std::pair{"head", &attempt.rates.head}}) {
    if (std::string text = contradiction(kernels, *curve); !text.empty()) return text;
  }
  return "";
}

}  // namespace

Measurement measure_part(const std::function<Attempt()>& attempt,
                         const std::function<bool(const std::string& why)>& again) {
  Attempt made = attempt();
  std::string disturbance = disturbance_of(made);
  if (!disturbance.empty() && again(disturbance)) {
    made = attempt();
    disturbance = disturbance_of(made);
  }
  const bool contradicts = !disturbance.empty() && made.others_share <= kMuchOtherWork;
  return {std::move(made.rates), std::move(disturbance), contradicts ? 1.0 : made.others_share,
          made.spread};
}

}  // namespace ballast::calibrate
