#pragma once

#include <atomic>

#include <nccl.h>

namespace ballast::test {

/// What fake_nccl.cpp does. It stands in, at link time, for NCCL, over MPI.
struct FakeNccl {
  /// What channels answer when they are asked how they are.
  static inline std::atomic<ncclResult_t> async_error = ncclSuccess;

  static inline std::atomic<int> finalized = 0;
  static inline std::atomic<int> destroyed = 0;
  static inline std::atomic<int> aborted = 0;
};

}  // namespace ballast::test
