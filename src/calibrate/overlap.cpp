#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "ballast/core/clocks.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

using Clock = std::chrono::steady_clock;

/// Calls `work` repeatedly on a separate thread, with pauses as long as the calls, because in a
/// step such work also comes in bursts, and the scheduler favors a thread that wakes up.
class Bursts {
 public:
  explicit Bursts(const std::function<void()>& work)
      : thread_([this, work](const std::stop_token& stop) {
          try {
            run(work, stop);
          } catch (...) {
            failure_ = std::current_exception();
          }
        }) {}

  /// Waits for the last call. Rethrows the exception of `work`. Call it before the functions below.
  void finish() {
    thread_.request_stop();
    thread_.join();
    if (failure_) std::rethrow_exception(failure_);
  }
  /// Returns the seconds in which `work` ran until `end`.
  [[nodiscard]] double busy_until(Clock::time_point end) const {
    return busy_ - std::max(0.0, seconds_between(end, end_));
  }
  [[nodiscard]] double seconds_per_call() const { return busy_ / calls_; }

 private:
  void run(const std::function<void()>& work, const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    do {
      const auto start = Clock::now();
      work();
      end_ = Clock::now();
      busy_ += seconds_between(start, end_);
      calls_ += 1.0;
      stopped.wait_for(lock, stop, end_ - start, [] { return false; });
    } while (!stop.stop_requested());
  }

  double busy_ = 0.0;
  double calls_ = 0.0;
  Clock::time_point end_ = Clock::now();
  std::exception_ptr failure_;
  std::jthread thread_;
};

constexpr double kOverlapSeconds = 0.1;

/// Calls `work` for at least kOverlapSeconds. Returns the number of calls.
int call(const std::function<void()>& work) {
  constexpr int kLeastCalls = 3;
  const auto start = Clock::now();
  int calls = 0;
  for (; calls < kLeastCalls || seconds_since(start) < kOverlapSeconds; ++calls) work();
  return calls;
}

double seconds_alone(const std::function<void()>& bursts) {
  Bursts alone(bursts);
  std::this_thread::sleep_for(std::chrono::duration<double>(kOverlapSeconds));
  alone.finish();
  return alone.seconds_per_call();
}

double median(std::vector<double> speeds) {
  constexpr double kSlowest = 0.05;
  std::sort(speeds.begin(), speeds.end());
  return std::clamp(speeds[speeds.size() / 2], kSlowest, 1.0);
}

}  // namespace

OverlapSpeeds overlap_speeds(const std::function<void()>& work,
                             const std::function<void()>& bursts) {
  constexpr std::size_t kRounds = 5;
  constexpr double kLong = 2.0;  // a slow drive is measured in one round
  std::vector<double> work_speeds;
  std::vector<double> burst_speeds;
  work();
  bursts();
  const auto first = Clock::now();
  while (work_speeds.size() < kRounds && (work_speeds.empty() || seconds_since(first) < kLong)) {
    const auto start = Clock::now();
    const int calls_alone = call(work);
    const double alone = seconds_since(start) / calls_alone;
    const double burst_alone = seconds_alone(bursts);
    const auto begin = Clock::now();
    Bursts overlapping(bursts);
    const int calls = call(work);
    const auto end = Clock::now();
    overlapping.finish();
    const double longer = seconds_between(begin, end) - calls * alone;
    work_speeds.push_back(1.0 - longer / std::max(overlapping.busy_until(end), 1e-9));
    burst_speeds.push_back(burst_alone / std::max(overlapping.seconds_per_call(), 1e-9));
  }
  return {.work = median(std::move(work_speeds)), .bursts = median(std::move(burst_speeds))};
}

}  // namespace ballast::calibrate
