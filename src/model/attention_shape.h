#pragma once

#include <cstddef>

namespace ballast::model {

/// Extents of a causal attention with grouped queries.
struct AttentionShape {
  std::size_t sequences = 0;
  std::size_t length = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  ///< divides heads
  std::size_t head_size = 0;

  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  [[nodiscard]] constexpr std::size_t hidden() const { return heads * head_size; }
  [[nodiscard]] constexpr std::size_t kv_hidden() const { return kv_heads * head_size; }
  /// Row length of [tokens, queries | keys | values].
  [[nodiscard]] constexpr std::size_t row() const { return hidden() + 2 * kv_hidden(); }
  /// Values that the logarithms of all rows' sums are.
  [[nodiscard]] constexpr std::size_t log_sums() const { return tokens() * heads; }
};

}  // namespace ballast::model
