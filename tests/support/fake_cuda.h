#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ballast::test {

/// What fake_cuda.cpp does. It stands in, at link time, for the CUDA runtime: device memory is host
/// memory and work is done when it is enqueued. So what Ballast does with CUDA is tested without a
/// GPU; what CUDA itself does is not.
struct FakeCuda {
  /// So many queries of a stream are answered "not ready".
  static inline std::atomic<int> busy_queries = 0;
  /// Allocations of more bytes fail.
  static inline std::atomic<std::size_t> most_at_once = SIZE_MAX;
};

}  // namespace ballast::test
