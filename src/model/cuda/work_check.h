#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/device/device.h"
#include "ballast/device/streams.h"
#include "ballast/model/attention.h"

#include "src/device/cuda/runtime.h"

namespace ballast::model::cuda {

/// Extents of an operation, for messages. Refers to them, so it must not outlive the call.
struct ShapeOfWork : std::span<const std::size_t> {
  ShapeOfWork(std::initializer_list<std::size_t> extents) : span(extents.begin(), extents.size()) {}
  ShapeOfWork(const std::array<std::size_t, 5>& extents) : span(extents) {}
};

/// Sequences, length, heads, heads of keys, size of a head.
inline std::array<std::size_t, 5> extents_of(const AttentionShape& s) {
  return {s.sequences, s.length, s.heads, s.kv_heads, s.head_dim};
}

/// Throws Error(device) with the operation's name and shape, "norm [64, 4096]: ...", if `code`, the
/// result of its launch, is an error or if the stream has failed. Waits for the stream.
void check_work(cudaError_t code, std::string_view what, ShapeOfWork shape, device::Stream& stream);

/// Finds tokens outside the vocabulary without waiting for the device.
class TokenCheck {
 public:
  /// Number of checks in flight for which the first check allocates pinned memory. A further check
  /// allocates again, and may wait for all work of the GPU. A stream of the engine has at most
  /// plan::kMaxOnFastStream unfinished operations, each with at most one check.
  static constexpr std::size_t kMaxChecks = 16;

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
