#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ballast/core/random.h"

namespace ballast::model {

/// Selects the elements of a matrix that are dropped; the others are multiplied by `factor`, which
/// keeps the mean. An element's number in the whole matrix decides, so the mask is the same in the
/// forward and backward pass and for any chunks. Source: Srivastava et al., "Dropout: A simple way
/// to prevent neural networks from overfitting", JMLR 15, 2014, section 10.
struct DropoutMask {
  std::uint64_t key = 0;
  std::uint64_t stream = 0;
  std::uint64_t first = 0;      ///< number of the view's first element, a multiple of 4
  std::uint32_t threshold = 0;  ///< elements with random words below it are dropped
  float factor = 1.0F;

  /// `probability`: in (0, 1).
  static constexpr DropoutMask of(double probability, std::uint64_t key, std::uint64_t stream,
                                  std::uint64_t first) {
    return {key, stream, first, static_cast<std::uint32_t>(probability * 0x1p32),
            static_cast<float>(1.0 / (1.0 - probability))};
  }
  /// Factors of elements [4 group, 4 group + 4) of the view.
  [[nodiscard]] constexpr std::array<float, 4> factors(std::size_t group) const {
    const auto words = philox(key, first / 4 + group, stream);
    return {words[0] < threshold ? 0.0F : factor, words[1] < threshold ? 0.0F : factor,
            words[2] < threshold ? 0.0F : factor, words[3] < threshold ? 0.0F : factor};
  }
};

}  // namespace ballast::model
