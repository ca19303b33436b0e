#pragma once

#include <atomic>
#include <cstdint>

#include <cublasLt.h>

namespace ballast::test {

/// What fake_cublaslt.cpp does. It stands in, at link time, for the loaded cuBLASLt: products of
/// column-major matrices in host memory, as their descriptors say, with sums in double, rounded
/// once. It refuses what cuBLASLt refuses, and what an algorithm was not searched for. The
/// workspace is overwritten.
struct FakeCublasLt {
  /// What the next search for an algorithm and the next product are answered.
  static inline std::atomic<cublasStatus_t> next_search = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<cublasStatus_t> next_product = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<int> searches = 0;
  /// Objects that were made and not ended.
  static inline std::atomic<int> alive = 0;
  /// What the last search allowed.
  static inline std::atomic<std::uint32_t> reductions = 0;
  static inline std::atomic<std::uint64_t> workspace = 0;
};

}  // namespace ballast::test
