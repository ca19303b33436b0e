#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include <time.h>

namespace ballast {

/// Calls task(i) for each i below `count` with at most `threads` threads, one of which is the
/// caller's. Each thread takes the smallest index that is left. After all calls, throws the error
/// of the smallest index whose call failed.
inline void run_in_parallel(std::size_t count, std::size_t threads,
                            const std::function<void(std::size_t)>& task) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::exception_ptr> errors(count);
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t t = 1; t < std::min(threads, count); ++t) others.emplace_back(work);
    work();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// Pauses between polls of work done elsewhere. Pauses start short, for low latency, and grow, so
/// that waiting threads leave the cores to working ones.
class Polling {
 public:
  /// Who does the work that is polled for: the polls themselves as far as they use much CPU time
  /// (MPI moves data in them), or a device, of which a poll only asks.
  enum class Worker { polls, device };

  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  using Now = TimePoint (*)();
  using CpuTime = Duration (*)();

  explicit Polling(Worker worker, Now now = &std::chrono::steady_clock::now,
                   CpuTime cpu_time = &of_this_thread)
      : worker_(worker),
        now_(now),
        cpu_time_(cpu_time),
        start_(now()),
        last_(start_),
        busy_(used()),
        sleep_(shortest()) {}

  /// Call it after each poll. If polls work, one that computed for long has made progress, so
  /// pauses become short again. A poll during which other threads ran has not.
  void pause() {
    advance();
    if (used() - busy_ > kBusyPoll) {
      polls_ = 0;
      sleep_ = shortest();
    }
    if (polls_++ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep_);
      sleep_ = std::min(longest(), sleep_ + sleep_ / 4);
    }
    advance();
    busy_ = used();
  }

  /// Seconds waited up to the last pause. Gaps above kStopped are ignored, because this process was
  /// stopped then (SIGSTOP, Ctrl-Z, a suspended machine).
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(last_ - start_).count();
  }

 private:
  static constexpr int kYields = 20;
  static constexpr Duration kBusyPoll = std::chrono::microseconds(4);
  static constexpr Duration kStopped = std::chrono::seconds(1);

  [[nodiscard]] bool polls_work() const { return worker_ == Worker::polls; }
  /// A query of a device takes some microseconds, so shorter pauses would take a core.
  [[nodiscard]] Duration shortest() const {
    return std::chrono::microseconds(polls_work() ? 10 : 20);
  }
  [[nodiscard]] Duration longest() const {
    return std::chrono::microseconds(polls_work() ? 1000 : 200);
  }
  /// CPU time that this thread has used. Reading it takes as long as a query of a device.
  [[nodiscard]] Duration used() const { return polls_work() ? cpu_time_() : Duration(); }

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

  Worker worker_;
  Now now_;
  CpuTime cpu_time_;
  TimePoint start_;
  TimePoint last_;
  Duration busy_;  ///< CPU time of this thread after the last pause
  int polls_ = 0;
  Duration sleep_;
};

}  // namespace ballast
