#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::model {

/// Tokens of a micro-batch [N], and the position of each in its document (null: in the sequence).
struct Ids {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* positions = nullptr;
};

/// Tables of the embedding, or of one tile of it, or their gradients; rows are hidden_size wide. A
/// row of tokens counts `scale` times, 1 if there are positions.
template <class T>
struct Embedding {
  T* tokens = nullptr;     ///< rows of the tokens [first, first + size)
  T* positions = nullptr;  ///< [>= length], or null
  float scale = 1.0F;
  std::size_t first = 0;
  std::size_t size = 0;
  /// A tile leaves the outputs of other tokens as they are; the last one adds the positions to all.
  bool tile = false;
};

}  // namespace ballast::model
