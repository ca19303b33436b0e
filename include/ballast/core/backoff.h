#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ballast {

/// Pauses between looks at work that others do: short at first, so that small work is quick, then
/// long, so that waiting threads do not take the cores from those that work.
class Backoff {
 public:
  using Duration = std::chrono::steady_clock::duration;

  /// `look`: how long the last look took. One that took its time has itself moved something, and
  /// more will come: pauses are short again.
  void pause(Duration look) {
    if (look > kBusyLook) {
      looks_ = 0;
      sleep_ = kShortest;
    }
    if (looks_++ < kYields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(kLongest, sleep_ + sleep_ / 4);
  }

 private:
  static constexpr int kYields = 20;
  static constexpr Duration kBusyLook = std::chrono::microseconds(4);
  static constexpr Duration kShortest = std::chrono::microseconds(10);
  static constexpr Duration kLongest = std::chrono::milliseconds(1);
  int looks_ = 0;
  Duration sleep_ = kShortest;
};

}  // namespace ballast
