#pragma once

#include <array>
#include <cstddef>

#include "src/model/matrix.h"

namespace ballast::model {

/// What a product that was made ready depends on, for caches of such.
struct ProductKey {
  std::array<std::size_t, 9> values;
  friend bool operator==(const ProductKey&, const ProductKey&) = default;
};

/// `also`: fewer than 16 bits of the product's own.
inline ProductKey product_key(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                              std::size_t also) {
  const auto type = [](const Matrix& m) { return static_cast<std::size_t>(m.type); };
  const std::size_t rest = type(a) | type(b) << 4U | type(c) << 8U | also << 12U;
  return {{e.m, e.n, e.k, a.row_step, a.column_step, b.row_step, b.column_step, c.row_step, rest}};
}

/// FNV-1a over the values.
struct ProductKeyHash {
  std::size_t operator()(const ProductKey& key) const {
    std::size_t hash = 0xcbf29ce484222325U;
    for (const std::size_t value : key.values) hash = (hash ^ value) * 0x100000001b3U;
    return hash ^ (hash >> 29);
  }
};

}  // namespace ballast::model
