#pragma once

#include <atomic>
#include <cstddef>

#include <nccl.h>

namespace ballast::test {

/// Controls fake_nccl.cpp, which replaces the loaded NCCL at link time, over MPI. The groups of all
/// channels of a process run one at a time, in the order in which they were started, as on a GPU
/// that has no room for two. So channels whose groups start in different orders on two ranks wait
/// for each other.
struct FakeNccl {
  /// The results of status queries of channels.
  static inline std::atomic<ncclResult_t> async_error = ncclSuccess;

  /// Memory that a channel takes on its GPU when it is made. A channel for which there is too
  /// little is not made.
  static inline std::atomic<std::size_t> channel_memory = 0;

  /// Number of groups of this process that run until its GPU hangs; negative: it never does.
  static inline std::atomic<int> groups_until_hang = -1;

  static inline std::atomic<int> finalized = 0;
  static inline std::atomic<int> destroyed = 0;
  static inline std::atomic<int> aborted = 0;
};

}  // namespace ballast::test
