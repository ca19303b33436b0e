#pragma once

#include <cstddef>
#include <limits>

namespace ballast::model {

/// What is known of a row of logits, part by part: cross-entropy = log(total) + largest - wanted.
/// The largest logit changes from part to part, and with it the total (Milakov & Gimelshein 2018,
/// arXiv 1805.02867).
template <class A>
struct RowSum {
  A largest = -std::numeric_limits<A>::infinity();
  A wanted = std::numeric_limits<A>::quiet_NaN();  ///< the logit of the target
  double total = 0.0;                              ///< sum of exp(logit - largest)
};

/// Logits of some rows for a tile of the vocabulary. Their gradients, in the training type, replace
/// them from each row's start.
struct LogitTile {
  float* logits = nullptr;
  std::size_t rows = 0;
  std::size_t stride = 0;  ///< floats from row to row, a multiple of 4
  std::size_t first = 0;   ///< token of the first column
  std::size_t width = 0;   ///< tokens
};

}  // namespace ballast::model
