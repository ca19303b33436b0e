#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ballast {

/// Pauses between polls of work done elsewhere. Pauses start short, for low latency, and grow, so
/// that waiting threads leave the cores to working ones.
class Polling {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  using Now = TimePoint (*)();

  explicit Polling(Now now = &std::chrono::steady_clock::now)
      : now_(now), start_(now()), last_(start_) {}

  /// Call it after each poll. A long poll has made progress, so pauses become short again.
  void pause() {
    if (advance() > kBusyPoll) {
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

  Duration advance() {
    const TimePoint now = now_();
    const Duration gap = now - last_;
    if (gap > kStopped) start_ += gap;
    last_ = now;
    return gap;
  }

  Now now_;
  TimePoint start_;
  TimePoint last_;
  int polls_ = 0;
  Duration sleep_ = kShortest;
};

}  // namespace ballast
