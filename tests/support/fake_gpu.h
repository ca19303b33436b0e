#pragma once

#include <atomic>

#include <nccl.h>

namespace ballast::test {

/// What fake_cuda.cpp and fake_nccl.cpp do. They stand in, at link time, for the CUDA runtime and
/// NCCL: device memory is host memory, work is done when it is enqueued, NCCL's transport is MPI.
/// So what Ballast does with both is tested without a GPU; what they do themselves is not.
struct FakeGpu {
  /// So many queries of a stream are answered "not ready".
  static inline std::atomic<int> busy_queries = 0;
  /// What channels answer when they are asked how they are.
  static inline std::atomic<ncclResult_t> async_error = ncclSuccess;

  static inline std::atomic<int> finalized = 0;
  static inline std::atomic<int> destroyed = 0;
  static inline std::atomic<int> aborted = 0;
};

}  // namespace ballast::test
