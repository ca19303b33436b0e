#pragma once

#include <cstddef>

namespace ballast::model {

/// A row per token: of a table, or the gradient of what they are mixed to.
template <class T>
struct TokenRows {
  T* rows = nullptr;
  std::size_t size = 0;   ///< tokens
  std::size_t width = 0;  ///< columns
};
/// Factors of Ops::links(): of a table's row, and of its sum with another row.
struct TokenMix {
  float scale = 1.0F;
  float factor = 1.0F;
};

}  // namespace ballast::model
