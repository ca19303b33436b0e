#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/dtype.h"

#include "src/model/compute/layer.h"
#include "src/model/description/families/decoder.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/team.h"

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

// Ops::copy_groups() and sum_groups() for rows [begin, end).

template <class T>
void copy_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                         const GroupSteps& to_steps, std::size_t zeros, std::size_t begin,
                         std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t group = 0; group < groups.count; ++group) {
      T* const at = to + row * to_steps.row + group * to_steps.group;
      std::copy_n(from + row * from_steps.row + group * from_steps.group, groups.width, at);
      std::fill_n(at + groups.width, zeros, T{});
    }
  }
}

template <class T>
void sum_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                        std::size_t to_row, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t column = 0; column < groups.width; ++column) {
      float sum = 0.0F;
      for (std::size_t group = 0; group < groups.count; ++group) {
        sum += to_float(from[row * steps.row + group * steps.group + column]);
      }
      to[row * to_row + column] = from_float<T>(sum);
    }
  }
}

/// Calls find(range, statistics) for each chunk of `size` values and returns the sum. `partial`:
/// one GradientStats per kStatsChunk values.
template <class Find>
GradientStats by_stats_chunks(std::size_t size, GradientStats* partial, const Find& find) {
  const std::size_t chunks = (size + kStatsChunk - 1) / kStatsChunk;
  split(chunks, 1, [&](Range here) {
    for (std::size_t chunk = here.begin; chunk < here.end; ++chunk) {
      const std::size_t begin = chunk * kStatsChunk;
      partial[chunk] = {};
      find(Range{begin, std::min(size, begin + kStatsChunk)}, partial[chunk]);
    }
  });
  GradientStats total;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    total.sum_of_squares += partial[chunk].sum_of_squares;
    total.non_finite += partial[chunk].non_finite;
  }
  return total;
}

/// Packs elements of a table. Returns whether there is a sum for one of them; if not, all are zero.
template <class T>
bool pack_rows(const TypeKernels<T>& kernels, const UnpackedGradient& from, Range range,
               T* packed) {
  const auto sum_row_at = [&](std::size_t element) {
    const std::size_t row = element / from.width;
    return row < from.rows ? from.sum_row_of[row] : kNoSumRow;
  };
  const auto end_of_row = [&](std::size_t element) {
    return std::min(range.end, (element / from.width + 1) * from.width);
  };
  bool any = false;
  GradientStats unused;
  for (std::size_t at = range.begin, end = at; at < range.end; at = end) {
    const std::uint32_t sum_row = sum_row_at(at);
    end = end_of_row(at);
    if (sum_row != kNoSumRow) {
      const float* const sums = from.sum_rows + sum_row * from.width + at % from.width;
      const float* const tied = at < from.tied_size ? from.tied + at : nullptr;
      kernels.gradients.pack(sums, tied, packed + at, end - at, &unused.sum_of_squares,
                             &unused.non_finite);
      any = true;
      continue;
    }
    while (end < range.end && sum_row_at(end) == kNoSumRow) end = end_of_row(end);
    const std::size_t tied = std::clamp(from.tied_size, at, end);
    if (tied > at) kernels.rows.convert(from.tied + at, 0, packed + at, 0, 1, tied - at);
    std::fill(packed + tied, packed + end, T());
    any = any || tied > at;
  }
  return any;
}

/// Rows of a table are packed first and then measured: the part that the tied gradient covers, then
/// the rest of the chunk.
template <class T>
GradientStats pack_gradient(const TypeKernels<T>& kernels, const UnpackedGradient& from, T* packed,
                            std::size_t size, GradientStats* partial) {
  return by_stats_chunks(size, partial, [&](Range range, GradientStats& stats) {
    const auto pack = [&](std::size_t begin, GradientStats& to) {
      if (begin == range.end) return;
      kernels.gradients.pack(from.rest + (begin - from.table), nullptr, packed + begin,
                             range.end - begin, &to.sum_of_squares, &to.non_finite);
    };
    if (range.begin >= from.table) return pack(range.begin, stats);
    const std::size_t end_of_table = std::min(from.table, range.end);
    GradientStats unused;
    const bool any = pack_rows(kernels, from, {range.begin, end_of_table}, packed);
    pack(end_of_table, unused);
    if (!any && end_of_table == range.end) return;
    const std::size_t border = std::clamp(from.tied_size, range.begin, range.end);
    for (const Range part : {Range{range.begin, border}, Range{border, range.end}}) {
      if (part.size() == 0) continue;
      kernels.gradients.measure(packed + part.begin, part.size(), &stats.sum_of_squares,
                                &stats.non_finite);
    }
  });
}

template <class T>
GradientStats measure_gradient(const GradientKernels<T>& kernels, const T* packed, std::size_t size,
                               GradientStats* partial) {
  return by_stats_chunks(size, partial, [&](Range range, GradientStats& stats) {
    kernels.measure(packed + range.begin, range.size(), &stats.sum_of_squares, &stats.non_finite);
  });
}

}  // namespace ballast::model::host
