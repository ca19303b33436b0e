#pragma once

#include <functional>
#include <vector>

#include "ballast/device/device.h"

/// The type that cudaStream_t points to.
struct CUstream_st;

namespace ballast::device {

/// A stream of the CUDA device, for code that enqueues CUDA work itself (src/comm/nccl*).
class CudaStream : public Stream {
 public:
  /// The handle for CUDA calls. Also makes this stream's device the calling thread's current
  /// device, as CUDA calls expect. Throws Error(device).
  virtual CUstream_st* native() = 0;

  using Watch = std::function<void(double waited_seconds)>;

  /// The next synchronize() calls `watch` periodically while it waits, and once more when all work
  /// is done. If `watch` throws, synchronize() throws the same at once: for work that may never
  /// finish, such as a collective. An owner's new watch replaces its previous one.
  virtual void set_watch(const void* owner, Watch watch) = 0;

  using Verdict = std::function<void()>;

  /// The next synchronize() of the stream, or of the next event recorded in it, calls `verdict`
  /// after the preceding work and rethrows its exception: for errors that kernels report in memory.
  /// Verdicts are called in order, each once.
  virtual void add_verdict(Verdict verdict) = 0;
  /// Removes and returns the verdicts that have not been called yet.
  virtual std::vector<Verdict> take_verdicts() = 0;
};

/// `stream` as one of the CUDA device. Throws Error(state) when it is another device's.
CudaStream& as_cuda(Stream& stream);

}  // namespace ballast::device
