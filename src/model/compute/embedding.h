#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::model {

/// Tokens of a micro-batch [N], the position of each in its document (null: in its sequence), and
/// for gradients its slot, or kNoSlot as -1 for a token that adds nothing.
struct Ids {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* positions = nullptr;
  const std::int32_t* slots = nullptr;
};

/// Tables of the embedding or of one of its tiles, or their gradients. Rows are hidden_size wide.
/// Token rows are multiplied by `scale`, which is 1 if there are positions.
template <class T>
struct Embedding {
  /// Rows of the tokens [first, first + size); a gradient has the rows of their slots.
  T* tokens = nullptr;
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

/// Marks a row of a table without a slot.
inline constexpr std::uint32_t kNoSlot = 0xFFFFFFFFU;

/// The gradient of a block before it is packed: of its first `table` elements by rows of the table,
/// then of the rest.
struct UnpackedGradient {
  const float* slots = nullptr;                ///< [slots, width]
  const std::uint32_t* slot_of_row = nullptr;  ///< [rows], or kNoSlot
  std::size_t rows = 0;
  std::size_t width = 0;
  std::size_t table = 0;  ///< rows and padding
  const float* rest = nullptr;
  const float* tied = nullptr;  ///< added to the first `tied_size` elements of the table
  std::size_t tied_size = 0;
};

}  // namespace ballast::model
