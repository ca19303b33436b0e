#pragma once

#include <functional>
#include <map>
#include <vector>

#include "ballast/device/device.h"

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
