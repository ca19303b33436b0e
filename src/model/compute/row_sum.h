#pragma once

#include <cstddef>
#include <limits>

#include "ballast/model/kernel_sizes.h"

namespace ballast::model {

/// Softmax state of a row of logits, updated part by part: cross-entropy = log(total) + largest -
/// wanted. When the largest logit changes, the total is rescaled (Milakov & Gimelshein 2018, arXiv
/// 1805.02867).
template <class A>
struct RowSum {
  A largest = -std::numeric_limits<A>::infinity();
  A wanted = std::numeric_limits<A>::quiet_NaN();  ///< logit of the target
  double total = 0.0;                              ///< sum of exp(logit - largest)
};

static_assert(sizeof(RowSum<float>) == kRowSumBytes);

/// Logits of some rows for a vocabulary tile. Their gradients, in the training type, overwrite
/// them, starting at the start of each row.
struct LogitTile {
  float* logits = nullptr;
  std::size_t rows = 0;
  std::size_t stride = 0;  ///< floats between rows, a multiple of 4
  std::size_t first = 0;   ///< token of the first column
  std::size_t width = 0;   ///< number of tokens
};

}  // namespace ballast::model
