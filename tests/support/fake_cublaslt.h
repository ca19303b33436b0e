#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include <cublasLt.h>

namespace ballast::test {

/// Controls fake_cublaslt.cpp, which replaces the loaded cuBLASLt at link time: products of
/// column-major matrices in host memory, as described by their descriptors, with sums in double,
/// rounded once. It refuses calls that cuBLASLt refuses, and products for which the algorithm was
/// not searched. It overwrites the workspace.
struct FakeCublasLt {
  /// Results of the next search for an algorithm and of the next product.
  static inline std::atomic<cublasStatus_t> next_search = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<cublasStatus_t> next_product = CUBLAS_STATUS_SUCCESS;
  static inline std::atomic<int> searches = 0;
  /// Number of algorithms that a search finds. Products with one of the first `refused` or with
  /// number `also_refused` are refused.
  static inline std::atomic<int> found = 3;
  static inline std::atomic<int> refused = 0;
  static inline std::atomic<int> also_refused = -1;
  /// Time by which a product with each algorithm advances FakeCuda::milliseconds.
  static inline std::array<std::atomic<double>, 8> milliseconds = {};
  /// Number of the last product's algorithm in its search, and number of products tried.
  static inline std::atomic<int> last_algorithm = -1;
  static inline std::atomic<int> tried = 0;
  /// Factor of all products, which is wrong unless it is 1.
  static inline std::atomic<float> factor = 1.0F;
  /// Number of existing objects.
  static inline std::atomic<int> alive = 0;
  /// Limits of the last search.
  static inline std::atomic<std::uint32_t> reductions = 0;
  static inline std::atomic<std::uint64_t> workspace = 0;
  /// Alignments of A, B, C and D that the last search assumed, in bytes.
  static inline std::array<std::atomic<std::uint32_t>, 4> alignments = {};
};

}  // namespace ballast::test
