#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace ballast::model {

/// Rotary positions: the pairs (x[i], x[i + n]) of the first 2n values of a head rotate by position
/// * frequency of pair i. Source: Su et al., "RoFormer", 2021, section 3.2.2.
struct Rotary {
  std::vector<double> frequencies;  ///< n, radians per token
  double factor = 1.0;              ///< multiplies cosines and sines
  /// Documents longer than this have frequencies that depend on their length, see frequency_in().
  /// Infinite: all documents have `frequencies`.
  double trained_length = std::numeric_limits<double>::infinity();
  std::vector<double> long_frequencies = {};  ///< n, if trained_length is finite
  double growth = 0.0;                        ///< growth of the base with the length; 0: none
  /// Growth of the factor with the position, see factor_at(); 0: none.
  double slope = 0.0;
  double period = 1.0;       ///< tokens between steps of the growth, above 0
  bool interleaved = false;  ///< the pairs are (x[2i], x[2i + 1])

  /// Returns whether a document that fills a sequence of `length` tokens exceeds trained_length.
  [[nodiscard]] bool depends_on_documents(std::size_t length) const {
    return static_cast<double>(length) > trained_length;
  }

  friend bool operator==(const Rotary&, const Rotary&) = default;
};

/// Frequency of pair `pair` of `pairs` in a document that is `ratio` > 1 times as long as
/// Rotary::trained_length. `long_frequency`: its member of long_frequencies. A base that grows by
/// (1 + growth * (ratio - 1))^(d / (d - 2)), where d = 2 * pairs, has frequencies that shrink by
/// this power. Source: bloc97, "NTK-aware scaled RoPE", 2023. constexpr for GPUs, see formulas.h.
constexpr double frequency_in(double ratio, double long_frequency, double growth, std::size_t pair,
                              std::size_t pairs) {
  if (growth == 0.0) return long_frequency;
  const double power = -static_cast<double>(pair) / static_cast<double>(pairs - 1);
  return long_frequency * std::pow(1.0 + growth * (ratio - 1.0), power);
}

/// Value of Rotary::factor at a position: factor * (1 + slope * ln(1 + floor(position / period))).
/// Llama 4 introduced it for queries, whose attention would flatten in long documents.
constexpr double factor_at(double position, double factor, double slope, double period) {
  if (slope == 0.0) return factor;
  return factor * (1.0 + slope * std::log(1.0 + std::floor(position / period)));
}

/// Number of tokens in the document of `row`. `positions`: positions of all rows in their
/// documents, in sequences of `length` rows; null: every sequence is one document.
constexpr std::size_t document_length(const std::int32_t* positions, std::size_t row,
                                      std::size_t length) {
  if (positions == nullptr) return length;
  const std::size_t start = row - static_cast<std::size_t>(positions[row]);
  // Documents do not overlap, so bisection finds the end of this one.
  std::size_t last = row;
  std::size_t behind = row / length * length + length;
  while (behind - last > 1) {
    const std::size_t middle = last + (behind - last) / 2;
    const bool same = middle - static_cast<std::size_t>(positions[middle]) == start;
    (same ? last : behind) = middle;
  }
  return behind - start;
}

/// Returns the frequencies of the pairs in a document of `tokens` tokens.
inline std::vector<double> frequencies_in_document(const Rotary& rotary, std::size_t tokens) {
  if (!rotary.depends_on_documents(tokens)) return rotary.frequencies;
  const double ratio = static_cast<double>(tokens) / rotary.trained_length;
  std::vector<double> frequencies = rotary.long_frequencies;
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = frequency_in(ratio, frequencies[i], rotary.growth, i, frequencies.size());
  }
  return frequencies;
}

}  // namespace ballast::model
