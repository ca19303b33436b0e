#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast::test {

/// What fake_cuda.cpp does. It stands in, at link time, for the CUDA runtime: device memory is host
/// memory and work is done when it is enqueued. So what Ballast does with CUDA is tested without a
/// GPU; what CUDA itself does is not.
struct FakeCuda {
  /// So many queries of a stream are answered "not ready".
  static inline std::atomic<int> busy_queries = 0;
  /// Allocations of more bytes fail.
  static inline std::atomic<std::size_t> most_at_once = SIZE_MAX;

  /// A piece of host memory.
  struct Piece {
    std::byte* start;
    std::size_t size;
  };
  /// What cudaHostRegister has registered and nobody has unregistered, by address.
  static std::vector<Piece> registered();
  /// So many registrations are granted, and all after them refused; negative: all are granted.
  static inline std::atomic<int> registrations_left = -1;
  /// Set to true by every registration, when there is one.
  static inline std::atomic<std::atomic<bool>*> told_of_registrations = nullptr;
  /// Calls of cudaHostUnregister that were refused.
  static inline std::atomic<int> refused_unregistrations = 0;

  /// Pieces of cudaMallocHost that nobody has freed.
  static inline std::atomic<int> host_allocations = 0;
  /// Calls that were to allow kernels shared memory; those for more bytes are refused.
  static inline std::atomic<int> shared_memory_calls = 0;
  static inline std::atomic<std::size_t> most_shared_memory = SIZE_MAX;
  /// Bytes that copies have moved so far.
  static inline std::atomic<std::size_t> copied_to_device = 0;
  static inline std::atomic<std::size_t> copied_to_host = 0;
};

}  // namespace ballast::test
