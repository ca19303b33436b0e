#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "ballast/model/kernel_sizes.h"

#include "src/model/compute/formulas.h"

namespace ballast::model {

/// Softmax state of a row of logits, or of a vocabulary tile of it: cross-entropy = log(total) +
/// largest - wanted. The default is the state of no logits. Its largest logit is finite, because
/// the difference of two infinities would be NaN.
template <class A>
struct RowSum {
  A largest = std::numeric_limits<A>::lowest();
  A wanted = std::numeric_limits<A>::quiet_NaN();  ///< logit of the target
  double total = 0.0;                              ///< sum of exp(logit - largest)
};

static_assert(sizeof(RowSum<float>) == kRowSumBytes);

/// Returns the state of two parts of a row together. The total of the part with the smaller largest
/// logit is rescaled (Milakov & Gimelshein 2018, arXiv 1805.02867). A total of NaN stays NaN.
/// Products are fused explicitly, so that all kernels of a device compute the same bits.
template <class A>
constexpr RowSum<A> merged(const RowSum<A>& a, const RowSum<A>& b) {
  const double distance = static_cast<double>(a.largest) - static_cast<double>(b.largest);
  const A wanted = b.wanted == b.wanted ? b.wanted : a.wanted;  // NaN: in neither
  if (b.largest > a.largest) {
    return {b.largest, wanted, std::fma(a.total, formulas::exp(distance), b.total)};
  }
  return {a.largest, wanted, std::fma(b.total, formulas::exp(-distance), a.total)};
}

/// Row sums of all vocabulary tiles, ordered by place (tensor parallelism), tile and row.
struct RowSumsOfTiles {
  const RowSum<float>* sums = nullptr;
  std::size_t places = 0;
  std::size_t tiles = 0;  ///< per place
  std::size_t rows = 0;
  std::size_t step = 0;  ///< RowSums between the first ones of two places

  /// Returns the state of a row: that of all tiles, merged in ascending order.
  [[nodiscard]] constexpr RowSum<float> merged_row(std::size_t row) const {
    RowSum<float> all = sums[row];
    for (std::size_t i = 1; i < places * tiles; ++i) {
      all = merged(all, sums[i / tiles * step + i % tiles * rows + row]);
    }
    return all;
  }
};

/// Logits of some rows for a vocabulary tile. Their gradients, in the training type, overwrite
/// them, starting at the start of each row.
struct LogitTile {
  float* logits = nullptr;
  std::size_t rows = 0;
  std::size_t stride = 0;  ///< floats between rows, a multiple of 4
  std::size_t first = 0;   ///< token of the first column
  std::size_t width = 0;   ///< number of tokens
  float cap = 0.0F;        ///< soft cap of the logits, see Family::logit_cap(); 0: none
};

}  // namespace ballast::model
