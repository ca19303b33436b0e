#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ballast::data {

/// A document, or a part of a document that is longer than a sequence.
struct Piece {
  std::uint64_t first = 0;  ///< its first token
  std::uint32_t length = 0;
  bool continues = false;  ///< whether the document continues after it
};

/// Cuts documents [offsets[i], offsets[i + 1]) into pieces of at most `length` tokens, in order.
/// Documents without tokens have no pieces.
std::vector<Piece> cut_documents(std::span<const std::uint64_t> offsets, std::uint64_t length);

/// Packs pieces into sequences by best-fit decreasing: longest first, each into the sequence with
/// the least sufficient free space (Ding et al., "Fewer Truncations Improve Language Modeling",
/// ICML 2024, section 3). A pure function of its arguments. Takes O(n log n) time and about 60
/// bytes per piece, of which 16 remain.
class Packing {
 public:
  /// Pieces have 1 to `length` tokens. With `seed`, pieces of equal length are taken in a random
  /// order, so that neighbours in the files do not share a sequence more often than others; without
  /// it, in order. Sequences are ordered by their first pieces, and pieces keep their order within
  /// a sequence.
  Packing(std::vector<Piece> pieces, std::uint64_t length, std::optional<std::uint64_t> seed);

  [[nodiscard]] std::uint64_t sequences() const { return starts_.size() - 1; }
  [[nodiscard]] std::span<const Piece> pieces(std::uint64_t sequence) const;
  /// Tokens of a sequence without padding.
  [[nodiscard]] std::uint64_t tokens(std::uint64_t sequence) const;

 private:
  std::vector<Piece> pieces_;          ///< sequence by sequence
  std::vector<std::uint64_t> starts_;  ///< first piece of each sequence, and the end of the last
};

}  // namespace ballast::data
