#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include <time.h>

namespace ballast {

/// Pauses between polls of work done elsewhere. Pauses start short, for low latency, and grow, so
/// that waiting threads leave the cores to working ones.
class Polling {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  using Now = TimePoint (*)();
  using CpuTime = Duration (*)();

  explicit Polling(Now now = &std::chrono::steady_clock::now, CpuTime cpu_time = &of_this_thread)
      : now_(now), cpu_time_(cpu_time), start_(now()), last_(start_), busy_(cpu_time()) {}

  /// Call it after each poll. A poll that computed for long has made progress, so pauses become
  /// short again. A poll during which other threads ran has not.
  void pause() {
    advance();
    if (cpu_time_() - busy_ > kBusyPoll) {
      polls_ = 0;
      sleep_ = kShortest;
    }
    if (polls_++ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep_);
      sleep_ = std::min(kLongest, sleep_ + sleep_ / 4);
    }
    advance();
    busy_ = cpu_time_();
  }

  /// Seconds waited up to the last pause. Gaps above kStopped are ignored, because this process was
  /// stopped then (SIGSTOP, Ctrl-Z, a suspended machine).
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(last_ - start_).count();
  }

 private:
  static constexpr int kYields = 20;
  static constexpr Duration kBusyPoll = std::chrono::microseconds(4);
  static constexpr Duration kShortest = std::chrono::microseconds(10);
  static constexpr Duration kLongest = std::chrono::milliseconds(1);
  static constexpr Duration kStopped = std::chrono::seconds(1);

  void advance() {
    const TimePoint now = now_();
    const Duration gap = now - last_;
    if (gap > kStopped) start_ += gap;
    last_ = now;
  }
  static Duration of_this_thread() {
    timespec used = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
  }

  Now now_;
  CpuTime cpu_time_;
  TimePoint start_;
  TimePoint last_;
  Duration busy_;  ///< CPU time of this thread after the last pause
  int polls_ = 0;
  Duration sleep_ = kShortest;
};

}  // namespace ballast
