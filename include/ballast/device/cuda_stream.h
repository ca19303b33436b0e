#pragma once

#include <functional>
#include <vector>

#include "ballast/device/device.h"

/// CUDA's own type behind cudaStream_t.
struct CUstream_st;

namespace ballast::device {

/// A stream of the CUDA device, for code that enqueues CUDA work itself (src/comm/nccl*).
class CudaStream : public Stream {
 public:
  /// For CUDA's functions. Makes the device of this stream the calling thread's current one, as
  /// those functions expect. Throws Error(device).
  virtual CUstream_st* native() = 0;

  /// Called with the seconds that a synchronize() has been waiting.
  using Watch = std::function<void(double waited_seconds)>;

  /// Has the next synchronize() call `watch` now and then while it waits, and once more when all
  /// work is done. What `watch` throws synchronize() throws, without waiting any longer: it is for
  /// work that may never end, such as a collective. Each owner has one watch, its last one, until
  /// then.
  virtual void set_watch(const void* owner, Watch watch) = 0;

  using Verdict = std::function<void()>;

  /// Has the next synchronize() of the stream, or of the next event recorded in it, call `verdict`
  /// once the work before is done; what it throws synchronize() throws: for findings that kernels
  /// leave in memory. Verdicts are called in turn, each once.
  virtual void add_verdict(Verdict verdict) = 0;
  /// Those that nobody has asked for yet; they are the caller's from now on.
  virtual std::vector<Verdict> take_verdicts() = 0;
};

/// `stream` as one of the CUDA device. Throws Error(state) when it is another device's.
CudaStream& as_cuda(Stream& stream);

}  // namespace ballast::device
