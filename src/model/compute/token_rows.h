#pragma once

#include <cstddef>

namespace ballast::model {

/// Rows of a table: one per token, or the gradient of all.
template <class T>
struct TokenRows {
  T* rows = nullptr;
  std::size_t size = 0;   ///< number of rows
  std::size_t width = 0;  ///< columns
};
/// Factors of Ops::links(): of a table's row, and of its sum with another row.
struct TokenMix {
  float scale = 1.0F;
  float factor = 1.0F;
};

}  // namespace ballast::model
