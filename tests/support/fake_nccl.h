#pragma once

#include <atomic>

#include <nccl.h>

namespace ballast::test {

/// Controls fake_nccl.cpp, which replaces the loaded NCCL at link time, over MPI.
struct FakeNccl {
  /// The results of status queries of channels.
  static inline std::atomic<ncclResult_t> async_error = ncclSuccess;

  static inline std::atomic<int> finalized = 0;
  static inline std::atomic<int> destroyed = 0;
  static inline std::atomic<int> aborted = 0;
};

}  // namespace ballast::test
