#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::model {

/// Order of the rows of a sequence-parallel layer's queries, keys and values, or of its results of
/// attention.
enum class RowOrder : std::uint8_t {
  local,    ///< [sequences, length], the rank's rows with the columns of all heads
  by_part,  ///< [parts, sequences, length], columns of one part's heads: parts of an all-to-all
  by_heads  ///< [sequences, parts, length], columns of one part's heads: whole sequences
};

/// Extents of a copy of all rows and columns from one order to another; one of the two is by_part.
struct Regrouping {
  std::size_t parts = 1;
  std::size_t sequences = 1;
  std::size_t length = 1;  ///< rows per sequence and part
  std::size_t first = 0;   ///< columns of one part in the queries, or in the results of attention
  std::size_t others = 0;  ///< columns of one part in the keys, and in the values
  RowOrder from = RowOrder::local;
  RowOrder to = RowOrder::by_part;

  /// Rows of a part's heads.
  [[nodiscard]] constexpr std::size_t rows() const { return parts * sequences * length; }
  /// Columns of a part's heads.
  [[nodiscard]] constexpr std::size_t width() const { return first + 2 * others; }
  /// Returns the first column of the queries, keys or values that `column` belongs to.
  [[nodiscard]] constexpr std::size_t group_of(std::size_t column) const {
    if (column < first) return 0;
    return column < first + others ? first : first + others;
  }
  /// Returns the offset in `order`, in elements, of `column` of the row that is row number `row` in
  /// the order by_part.
  [[nodiscard]] constexpr std::size_t at(RowOrder order, std::size_t row,
                                         std::size_t column) const {
    if (order == RowOrder::by_part) return row * width() + column;
    const std::size_t part = row / (sequences * length);
    const std::size_t local = row % (sequences * length);
    if (order == RowOrder::by_heads) {
      return ((local / length * parts + part) * length + local % length) * width() + column;
    }
    const std::size_t begin = group_of(column);
    const std::size_t wide = begin == 0 ? first : others;
    return (local * width() + begin) * parts + part * wide + column - begin;
  }
};

}  // namespace ballast::model
