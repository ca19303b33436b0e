#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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

/// The type that cudaStream_t points to.
struct CUstream_st;

namespace ballast::device {

/// A stream of the CUDA device, for code that enqueues CUDA work itself (src/comm/nccl*).
class CudaStream : public Stream {
 public:
  /// Returns the handle for CUDA calls, and makes this stream's device the calling thread's current
  /// device, as CUDA calls expect. Throws Error(device).
  virtual CUstream_st* native() = 0;

  using Watch = std::function<void(double waited_seconds)>;

  /// Makes the next synchronize() of the stream, or of the next event recorded in it, call `watch`
  /// periodically while it waits, and once more when the preceding work is done. If `watch` throws,
  /// synchronize() throws the same exception immediately. This is for work that may never finish,
  /// such as a collective. A new watch replaces its owner's previous one.
  virtual void set_watch(const void* owner, Watch watch) = 0;

  using Watches = std::map<const void*, Watch>;  ///< by owner

  /// Removes and returns the watches that no synchronize() has used yet.
  virtual Watches take_watches() = 0;

  using Verdict = std::function<void()>;

  /// Makes the next synchronize() of the stream, or of the next event recorded in it, call
  /// `verdict` after the preceding work and rethrow its exception. This is for errors that kernels
  /// report in memory. Verdicts are called in order, once each.
  virtual void add_verdict(Verdict verdict) = 0;
  /// Removes and returns the verdicts that have not been called yet.
  virtual std::vector<Verdict> take_verdicts() = 0;
};

/// Casts `stream` to a stream of the CUDA device. Throws Error(state) if it belongs to another
/// device.
CudaStream& as_cuda(Stream& stream);

}  // namespace ballast::device
