#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ballast::data {

/// A document, or a part of one that is longer than a sequence.
struct Piece {
  std::uint64_t first = 0;  ///< its first token
  std::uint32_t length = 0;
  bool continues = false;  ///< the document goes on after it
};

/// Cuts documents, which are [offsets[i], offsets[i + 1]), into pieces of at most `length` tokens,
/// in order. Documents without tokens have no piece.
std::vector<Piece> cut_documents(std::span<const std::uint64_t> offsets, std::uint64_t length);

/// Pieces packed into sequences by best-fit decreasing: the longest first, each into the sequence
/// with the least free space that suffices (Ding et al., "Fewer Truncations Improve Language
/// Modeling", ICML 2024, section 3). A pure function of its arguments. Takes O(n log n) time and
/// about 60 bytes per piece, of which 16 remain.
class Packing {
 public:
  /// Pieces have 1 to `length` tokens. With `seed`, pieces of equal length are taken in an order
  /// that it chooses, so that neighbours in the files do not share a sequence more often than
  /// others; without it, in their order. Sequences are in the order of their first pieces, and
  /// pieces within a sequence in their own.
  Packing(std::vector<Piece> pieces, std::uint64_t length, std::optional<std::uint64_t> seed);

  [[nodiscard]] std::uint64_t sequences() const { return starts_.size() - 1; }
  [[nodiscard]] std::span<const Piece> pieces(std::uint64_t sequence) const;
  /// Tokens of a sequence that are not padding.
  [[nodiscard]] std::uint64_t tokens(std::uint64_t sequence) const;

 private:
  std::vector<Piece> pieces_;          ///< sequence by sequence
  std::vector<std::uint64_t> starts_;  ///< first piece of each sequence, and the end
};

}  // namespace ballast::data
