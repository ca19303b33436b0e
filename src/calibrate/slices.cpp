#include "src/calibrate/slices.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <vector>

#include "ballast/core/seconds.h"

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
  constexpr double kMostWaiting = 0.02;
  constexpr std::size_t kEnough = 3;
  std::vector<double> all;
  std::vector<double> clean;
  for (const Slice& slice : slices) {
    all.push_back(slice.wall);
    if (slice.waited <= kMostWaiting * slice.wall) clean.push_back(slice.wall);
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

}  // namespace ballast::calibrate
