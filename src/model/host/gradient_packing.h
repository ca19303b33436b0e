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

/// Packs elements of a table. Returns whether there is a sum for one of them; if not, all are zero.
template <class T>
bool pack_rows(const TypeKernels<T>& kernels, const UnpackedGradient& from, Range range,
               T* packed) {
  const auto slot_at = [&](std::size_t element) {
    const std::size_t row = element / from.width;
    return row < from.rows ? from.slot_of_row[row] : kNoSlot;
  };
  const auto end_of_row = [&](std::size_t element) {
    return std::min(range.end, (element / from.width + 1) * from.width);
  };
  bool any = false;
  GradientStats unused;
  for (std::size_t at = range.begin, end = at; at < range.end; at = end) {
    const std::uint32_t slot = slot_at(at);
    end = end_of_row(at);
    if (slot != kNoSlot) {
      const float* const sums = from.slots + slot * from.width + at % from.width;
      const float* const tied = at < from.tied_size ? from.tied + at : nullptr;
      kernels.gradients.pack(sums, tied, packed + at, end - at, &unused.sum_of_squares,
                             &unused.non_finite);
      any = true;
      continue;
    }
    while (end < range.end && slot_at(end) == kNoSlot) end = end_of_row(end);
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
