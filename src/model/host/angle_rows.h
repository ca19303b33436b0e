#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/model/compute/layer.h"
#include "src/model/spec/families/rotary.h"

namespace ballast::model::host {

/// Ops::fill_angles() for rows [begin, end) of the table. `length`: tokens of a whole sequence.
inline void fill_angle_rows(const Rotary& rotary, const Angles& angles,
                            const std::int32_t* positions, std::size_t length, std::size_t begin,
                            std::size_t end) {
  std::size_t document = 0;
  std::vector<double> frequencies = rotary.frequencies;
  for (std::size_t row = begin; row < end; ++row) {
    if (angles.by_row) {
      const std::size_t tokens = document_length(positions, row, length);
      if (tokens != document) frequencies = frequencies_in_document(rotary, tokens);
      document = tokens;
    }
    const bool given = angles.by_row && positions != nullptr;
    const auto position =
        static_cast<double>(given ? static_cast<std::size_t>(positions[row]) : row % length);
    const double factor = factor_at(position, rotary.factor, rotary.slope, rotary.period);
    for (std::size_t i = 0; i < angles.half; ++i) {
      const double angle = position * frequencies[i];
      angles.cosine[row * angles.half + i] = static_cast<float>(std::cos(angle) * factor);
      angles.sine[row * angles.half + i] = static_cast<float>(std::sin(angle) * factor);
    }
  }
}

}  // namespace ballast::model::host
