#pragma once

#include <chrono>
#include <map>
#include <span>
#include <string>

namespace ballast::calibrate {

/// Times of one slice of a measurement, in seconds.
struct Slice {
  double wall = 0.0;
  double cpu = 0.0;     ///< CPU time of all threads of this process
  double waited = 0.0;  ///< time runnable without a CPU, summed over the threads of this process
};

/// Properties of the measured work, and of the machine while it ran.
struct SliceConditions {
  /// CPUs that the work keeps busy. 0: it runs elsewhere, for example on a GPU or a drive.
  double cpus = 1.0;
  /// True if other processes use the CPUs, so that wall times mean little.
  bool busy = false;
};

/// An estimate from repeated slices of the same work.
struct SliceEstimate {
  double seconds = 0.0;  ///< time of a slice on an otherwise idle machine, at least 1e-9
  /// Time by which the median of the slices exceeds `seconds`, relative to `seconds`. A few percent
  /// on an idle machine.
  double spread = 0.0;
};

/// Estimates the seconds that slices of the same work take on an otherwise idle machine.
///
/// Other work can only make a slice longer, so the fastest one is closest to the truth. Slices of
/// up to 1.1 times its wall time differ by the jitter of an idle machine, which a step has, too:
/// the result is their mean. Slices whose threads waited for a CPU are excluded if enough others
/// remain. Times of drives differ without other work, so for work elsewhere the result is the mean
/// of the slices up to twice the median.
///
/// On a busy machine almost no slice is undisturbed, because a team of threads is only as fast as
/// the thread that waits longest for its CPU. The CPU time of the same work hardly depends on other
/// processes, which can only lengthen it through caches and memory. The result is the minimum CPU
/// time per CPU of the work; for work on one CPU, at least the wall time without waits. It is up to
/// 10% too short for kernels with serial parts. For work elsewhere it is the lower quartile of the
/// wall times, which excludes late wake-ups.
SliceEstimate undisturbed_time(std::span<const Slice> slices, const SliceConditions& conditions);

/// Measures slices of this process's work. Linux reports in /proc/self/task/TID/schedstat how long
/// a thread has waited for a CPU; without this file the waits are 0.
class SliceClock {
 public:
  void start();
  /// Returns the times since start().
  Slice stop();

 private:
  /// Seconds that each thread has waited for a CPU since its start.
  using Waits = std::map<std::string, double>;
  static Waits read_waits();

  std::chrono::steady_clock::time_point start_;
  double cpu_ = 0.0;
  Waits waits_;
};

}  // namespace ballast::calibrate
