#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include <cublasLt.h>

namespace ballast::test {

/// Controls fake_cublaslt.cpp, which replaces the loaded cuBLASLt at link time: products of
/// column-major matrices in host memory, as their descriptors say, with sums in double, rounded
/// once. It refuses calls that cuBLASLt refuses, and products for which the algorithm was not
/// searched. It overwrites the workspace.
struct FakeCublasLt {
  /// The results of the next search for an algorithm and of the next product.
  static inline std::atomic<cublasStatus_t> next_search = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<cublasStatus_t> next_product = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<int> searches = 0;
  /// Algorithms that a search finds; each product with one of the first `refused` is refused, and
  /// with that of the place `also_refused`.
  static inline std::atomic<int> found = 3;
  static inline std::atomic<int> refused = 0;
  static inline std::atomic<int> also_refused = -1;
  /// How far a product with the algorithm of each place advances FakeCuda::milliseconds.
  static inline std::array<std::atomic<double>, 8> milliseconds = {};
  /// The place of the last product's algorithm in its search, and the number of products tried.
  static inline std::atomic<int> last_algorithm = -1;
  static inline std::atomic<int> tried = 0;
  /// Objects that exist.
  static inline std::atomic<int> alive = 0;
  /// Limits of the last search.
  static inline std::atomic<std::uint32_t> reductions = 0;
  static inline std::atomic<std::uint64_t> workspace = 0;
};

}  // namespace ballast::test
