#pragma once

#include <cstdint>

namespace ballast::model {

/// Tokens of a micro-batch [N], and the position of each in its document (null: in the sequence).
struct Ids {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* positions = nullptr;
};

/// Tables of the embedding, or their gradients; rows are hidden_size wide. A row of tokens counts
/// `scale` times, 1 if there are positions.
template <class T>
struct Embedding {
  T* tokens = nullptr;     ///< [vocabulary]
  T* positions = nullptr;  ///< [>= length], or null
  float scale = 1.0F;
};

}  // namespace ballast::model
