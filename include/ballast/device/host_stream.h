#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "ballast/device/device.h"

namespace ballast::device {

/// Returns the default number of threads per kernel on the host device: the CPUs that this process
/// may use, or OMP_NUM_THREADS if that is less.
int default_compute_threads();

/// A stream of the host device: one thread that runs enqueued functions, such as kernels, in order.
class HostStream final : public Stream {
 public:
  /// `name`: thread name, cut after 15 characters. `compute_threads`: size of the OpenMP team for
  /// kernels enqueued here.
  HostStream(const std::string& name, int compute_threads);
  /// Completes the enqueued work.
  ~HostStream() override;

  /// Runs `work` after everything enqueued before. synchronize() rethrows its exception. Work of
  /// this stream that enqueues more on it runs that at once, as a part of itself.
  void enqueue(std::function<void()> work);
  void synchronize() override;

  /// Number of items enqueued so far.
  [[nodiscard]] std::uint64_t enqueued() const;
  /// Blocks the caller until `count` items are done. Does not rethrow.
  void wait_until(std::uint64_t count) const;
  /// Rethrows the failure that synchronize() would rethrow, if one of the first `count` items
  /// raised it. The stream keeps the failure.
  void throw_failure_within(std::uint64_t count) const;

 private:
  void run(int compute_threads);

  mutable std::mutex mutex_;
  std::condition_variable added_;          ///< work, or the stream stops
  mutable std::condition_variable ended_;  ///< an item
  std::deque<std::function<void()>> work_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t finished_ = 0;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::uint64_t failed_ = 0;  ///< number of the failed item, from 1
  std::thread thread_;
};

/// Casts `stream` to a stream of the host device. Throws Error(state) if it belongs to another
/// device.
HostStream& as_host(Stream& stream);

}  // namespace ballast::device
