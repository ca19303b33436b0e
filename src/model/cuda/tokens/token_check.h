#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ballast/device/cuda_stream.h"

namespace ballast::model::cuda {

/// Finds tokens outside the vocabulary without waiting for the device.
class TokenCheck {
 public:
  /// Number of checks in flight for which the first check allocates pinned memory. A further check
  /// allocates again, and may wait for all work of the GPU. A stream of the engine has at most
  /// plan::kMostOnFastStream unfinished operations, each with at most one check.
  static constexpr std::size_t kMostChecks = 16;

  TokenCheck();

  /// Sets the device memory, one number. Call it before the first check.
  void set_memory(std::uint32_t* first_bad) { first_bad_ = first_bad; }

  /// Enqueues a check of tokens [count]. If a token is outside [least, vocabulary), the stream's
  /// verdict (CudaStream::add_verdict) throws Error(data) with the first one, which must still be
  /// in memory then. Throws Error(device).
  void enqueue(device::CudaStream& stream, const std::int32_t* tokens, std::size_t count,
               std::int32_t least, std::size_t vocabulary);

 private:
  class Words;

  std::uint32_t* first_bad_ = nullptr;
  std::shared_ptr<Words> words_;
};

}  // namespace ballast::model::cuda
