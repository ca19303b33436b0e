#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/dtype.h"

namespace ballast::model::host {

/// Rows and columns of the largest tile of a result: 24 vectors of fp32 sums, so that a CPU with
/// AVX-512 has registers left for the operands.
constexpr std::size_t kBf16TileRows = 6;
constexpr std::size_t kBf16TileColumns = 64;

/// Operands of the sums of a tile. Two consecutive terms of a sum are a pair.
struct Bf16TileOperands {
  const std::byte* a;  ///< the pairs of element (r, p) are at a + r * a_row + p * a_pair
  std::size_t a_row;   ///< bytes
  std::size_t a_pair;  ///< bytes
  const std::byte* b;  ///< [pairs, kBf16TileColumns] pairs, 64-byte-aligned
  std::size_t pairs;   ///< pairs of each sum
};

/// Result of a tile. The new value of an element is its sum + its bias (+ its old value).
template <class C>
struct Bf16TileResult {
  const float* sums;  ///< [rows, kBf16TileColumns]
  std::size_t rows;
  std::size_t columns;
  const Bf16* bias;  ///< [columns] or null
  C* values;
  std::size_t row_step;  ///< elements
  bool adds;             ///< whether the old value is added
  /// Writes past the caches. `values` and their rows are 64-byte-aligned.
  bool streams = false;
};

/// Kernels of bf16 products for CPUs with AVX-512 bf16. A sum adds its pairs in ascending order
/// with VDPBF16PS, which treats denormal numbers as 0 (Intel SDM, volume 2).
struct Bf16Kernels {
  /// Element r - 1 computes tiles of r rows and kBf16TileColumns columns: sums = (old sums +) sums
  /// of products. Rows of `sums` are sum_row elements apart and 64-byte-aligned.
  void (*sum_tile[kBf16TileRows])(const Bf16TileOperands& operands, float* sums,
                                  std::size_t sum_row, bool continues);
  void (*finish_f32)(const Bf16TileResult<float>& tile);
  void (*finish_bf16)(const Bf16TileResult<Bf16>& tile);
  /// Makes streamed results visible to other threads.
  void (*end_streams)();
  /// Writes the pairs of the columns of from[terms, width] to `to` [pairs, to_width]. Pads with
  /// zeros. `to_width`: a multiple of 32, at least `width`.
  void (*pair_rows)(const Bf16* from, std::size_t row_step, std::size_t terms, std::size_t width,
                    std::size_t to_width, Bf16* to);
  /// Writes the pairs of the rows of from[width, terms] to `to` [pairs, kBf16TileColumns]. Pads
  /// with zeros.
  void (*pair_columns)(const Bf16* from, std::size_t row_step, std::size_t terms, std::size_t width,
                       Bf16* to);
};

/// The kernels, or null if they are not compiled in. They run only on a CPU with AVX-512 bf16.
const Bf16Kernels* bf16_kernels();

}  // namespace ballast::model::host
