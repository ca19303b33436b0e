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

/// Threads of a kernel on the host device when nobody says: the CPUs that this process may use,
/// fewer if the user's OMP_NUM_THREADS says so.
int default_compute_threads();

/// A stream of the host device: one thread that runs enqueued functions in order. Host kernels
/// (src/model/host) are enqueued here.
class HostStream final : public Stream {
 public:
  /// `name`: thread name, at most 15 characters. `compute_threads`: threads that a kernel enqueued
  /// here may use (the OpenMP team of this stream's thread).
  HostStream(const std::string& name, int compute_threads);
  /// Finishes what is enqueued.
  ~HostStream() override;

  /// Runs `work` after everything enqueued before. An exception it throws is kept for
  /// synchronize().
  void enqueue(std::function<void()> work);
  void synchronize() override;

  /// Number of items enqueued so far; with wait_until(), the basis of events.
  [[nodiscard]] std::uint64_t enqueued() const;
  /// Blocks the caller until `count` items are done. Does not rethrow.
  void wait_until(std::uint64_t count) const;
  /// Rethrows the failure that synchronize() would, if one of the first `count` items has raised
  /// it. It stays with the stream.
  void throw_failure_within(std::uint64_t count) const;

 private:
  void run(int compute_threads);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t finished_ = 0;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::uint64_t failed_ = 0;  ///< number of the item that raised it, from 1
  std::thread thread_;
};

/// `stream` as one of the host device. Throws Error(state) for another device's.
HostStream& as_host(Stream& stream);

}  // namespace ballast::device
