#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ballast {

/// A wait that looks again and again at work that others do. Pauses between looks are short at
/// first, so that small work is quick, then long, so that waiting threads do not take the cores
/// from those that work.
class Polling {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  using Now = TimePoint (*)();

  explicit Polling(Now now = &std::chrono::steady_clock::now)
      : now_(now), start_(now()), last_(start_) {}

  /// After a look. One that took its time has itself moved something, and more will come: pauses
  /// are short again.
  void pause() {
    if (advance() > kBusyLook) {
      looks_ = 0;
      sleep_ = kShortest;
    }
    if (looks_++ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep_);
      sleep_ = std::min(kLongest, sleep_ + sleep_ / 4);
    }
    advance();
  }

  /// How long this has waited, up to the last pause. A gap as long as only those have that were
  /// stopped (SIGSTOP, Ctrl-Z, a suspended machine) does not count: nobody else was late in it.
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(last_ - start_).count();
  }

 private:
  static constexpr int kYields = 20;
  static constexpr Duration kBusyLook = std::chrono::microseconds(4);
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
  int looks_ = 0;
  Duration sleep_ = kShortest;
};

}  // namespace ballast
