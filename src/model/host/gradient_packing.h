#pragma once

#include <algorithm>
#include <cstddef>

#include "ballast/core/gradient_stats.h"

#include "src/model/compute/layer.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/team.h"

namespace ballast::model::host {

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

/// Packs the part of each chunk that the tied gradient covers, then the rest.
template <class T>
GradientStats pack_gradient(const GradientKernels<T>& kernels, const float* gradient,
                            const float* tied, std::size_t tied_size, T* packed, std::size_t size,
                            GradientStats* partial) {
  return by_stats_chunks(size, partial, [&](Range range, GradientStats& stats) {
    const std::size_t border = std::clamp(tied_size, range.begin, range.end);
    if (border > range.begin) {
      kernels.pack(gradient + range.begin, tied + range.begin, packed + range.begin,
                   border - range.begin, &stats.sum_of_squares, &stats.non_finite);
    }
    if (border < range.end) {
      kernels.pack(gradient + border, nullptr, packed + border, range.end - border,
                   &stats.sum_of_squares, &stats.non_finite);
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
