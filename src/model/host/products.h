#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

#include "src/model/compute/matrix.h"
#include "src/model/host/bf16_kernels.h"

namespace ballast::model::host {

/// Numbers of parts into which the rows and the columns of a result are cut.
struct ProductGrid {
  std::size_t rows = 1;
  std::size_t columns = 1;
};

/// Shortest side of a part, apart from the last unit. In oneDNN, results of one row or column use
/// another kernel with another order of sums.
constexpr std::size_t kShortestSide = 64;

/// Returns the fastest grid of at most `parts` parts, of which each thread computes one.
inline ProductGrid grid_of(const Extents& e, std::size_t parts) {
  // Copying a row or column of the operands takes as long as multiplying this many.
  constexpr std::size_t kCopy = 40;
  const std::size_t most_rows = std::clamp<std::size_t>(e.m / kShortestSide, 1, parts);
  const std::size_t most_columns = std::max<std::size_t>(e.n / kShortestSide, 1);
  ProductGrid best;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  for (std::size_t rows = 1; rows <= most_rows; ++rows) {
    const std::size_t columns = std::min(parts / rows, most_columns);
    const std::size_t cost = (e.m / rows + kCopy) * (e.n / columns + kCopy);
    if (cost < least) best = {rows, columns};
    least = std::min(least, cost);
  }
  return best;
}

// Products of bf16 matrices with fp32 sums on CPUs with AVX-512 bf16. They need bf16_kernels(). The
// bits of an element depend only on its operands: not on the number of threads, on its place or on
// the shape of the result.

/// c = a * b (+ bias per column, bf16) (+ c). `c`: fp32 or bf16. Uses the caller's team of threads.
void multiply_bf16(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                   bool add_to_c, const void* bias);

// Products on the calling thread whose operands serve several times.

/// Rows of a left operand. The pairs of consecutive terms of a row are pair_step apart.
struct Bf16Rows {
  const Bf16* first = nullptr;
  std::size_t row_step = 0;   ///< elements
  std::size_t pair_step = 2;  ///< elements
};
/// Right operand [terms, columns]: panels of kBf16TileColumns columns with [pairs, columns] pairs.
struct Bf16Pairs {
  const Bf16* first = nullptr;  ///< 64-byte-aligned
  std::size_t terms = 0;        ///< length of the sums over the whole operand
  /// The operand from an even term and a multiple of kBf16TileColumns columns on.
  [[nodiscard]] Bf16Pairs from(std::size_t term, std::size_t column) const {
    return {first + column * round_up(terms, 2) + term * kBf16TileColumns, terms};
  }
};

/// Elements of the Bf16Pairs of [terms, columns].
constexpr std::size_t bf16_pairs_size(std::size_t terms, std::size_t columns) {
  return round_up(terms, 2) * round_up(columns, kBf16TileColumns);
}
/// Writes the pairs of b [terms, columns], padded with zeros.
Bf16Pairs pair_bf16(const Matrix& b, std::size_t terms, std::size_t columns, Bf16* to);
/// Writes the rows that are the columns of from[terms, rows] to `to` [round_up(terms, 2),
/// round_up(rows, 32)].
Bf16Rows pair_bf16_columns(const Bf16* from, std::size_t row_step, std::size_t terms,
                           std::size_t rows, Bf16* to);
/// c[m, n] = a * b (+ c). If `k` is odd, the term after the last must be finite. Rows of c are
/// 64-byte-aligned and have round_up(n, kBf16TileColumns) columns, all of which are written.
void multiply_pairs(const Extents& extents, const Bf16Rows& a, const Bf16Pairs& b, float* c,
                    std::size_t c_row, bool add_to_c);

/// Implements Compute::arithmetic() for kernels and products on `threads` threads.
std::string describe_arithmetic(std::size_t threads);

/// Returns whether products.h multiplies bf16 matrices: on CPUs with AVX-512 bf16 but without
/// AMX, which is faster. DNNL_MAX_CPU_ISA can hide either.
bool has_own_bf16_products();

/// Matrix products with fp32 accumulation: oneDNN's, and own ones (products.h) for bf16 on
/// CPUs with AVX-512 bf16, apart from weight gradients. oneDNN's primitives are made once per
/// shape, for the caller's number of threads. If oneDNN has no bf16 products for the CPU (below
/// AVX-512), bf16 matrices are first widened to fp32 copies. fp16 matrices always are, because
/// oneDNN has fp16 products only for AVX512-FP16. On CPUs with AVX-512 the bits of a product are
/// the same for every number of threads. Errors: Error(device).
class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// c = a * b (+ bias per column, of a's type) (+ c). `c` is written; its column_step is 1.
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c = false, const void* bias = nullptr);
  /// Makes the primitive for such a product. Only strides and types of the matrices matter.
  void prepare(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
               bool add_to_c = false);
  /// Runs multiply() for a prepared product. Threads may call it concurrently.
  void multiply_prepared(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                         bool add_to_c = false) const;

 private:
  void multiply_tiles(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                      bool add_to_c, const void* bias);

  struct Cache;
  std::unique_ptr<Cache> cache_;
};

}  // namespace ballast::model::host
