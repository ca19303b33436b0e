#pragma once

#include <cstddef>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

#include "src/model/compute/matrix.h"
#include "src/model/host/bf16_kernels.h"

namespace ballast::model::host {

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

}  // namespace ballast::model::host
