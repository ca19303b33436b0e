#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::model {

/// Tokens of a micro-batch [N], and the position of each in its document (null: in its sequence).
struct Ids {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* positions = nullptr;
};

/// Tables of the embedding or of one of its tiles, or their gradients. Rows are hidden_size wide.
/// Token rows are multiplied by `scale`, which is 1 if there are positions.
template <class T>
struct Embedding {
  T* tokens = nullptr;     ///< rows of the tokens [first, first + size)
  T* positions = nullptr;  ///< [>= length], or null
  float scale = 1.0F;
  std::size_t first = 0;
  std::size_t size = 0;
  /// True for a tile: it writes only the outputs of its tokens. The last tile adds the positions to
  /// all.
  bool tile = false;
  /// True for the first tile of a tensor place: outputs of all other tokens become -0.0, which
  /// changes no value that is added to it.
  bool begins = false;
};

}  // namespace ballast::model
