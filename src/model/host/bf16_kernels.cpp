// Compiled for AVX-512 bf16. It uses no inline functions of the standard library, because the
// linker would keep one copy for all instruction sets.
#include "src/model/host/bf16_kernels.h"

#include <immintrin.h>

namespace ballast::model::host {
namespace {

using Size = std::size_t;

constexpr Size kLanes = 16;
constexpr Size kVectors = kBf16TileColumns / kLanes;  ///< in a row of a tile

/// Masks of the first lanes, for `left` elements that begin at a vector.
__mmask16 floats_of(Size left) {
  return static_cast<__mmask16>(left >= kLanes ? 0xffffU : (1U << left) - 1U);
}
__mmask32 halves_of(Size left) {
  return left >= 2 * kLanes ? 0xffffffffU : (1U << left) - 1U;
}

int pair_at(const std::byte* at) {
  int pair = 0;
  __builtin_memcpy(&pair, at, sizeof pair);
  return pair;
}

template <int kRows>
void sum_tile(const Bf16TileOperands& operands, float* sums, Size sum_row, bool continues) {
  __m512 sum[kRows][kVectors];
  for (auto& row : sum) {
    for (__m512& part : row) part = _mm512_setzero_ps();
  }
  const Size row = operands.a_row;
  const std::byte* a = operands.a;
  const std::byte* b = operands.b;
  for (Size p = 0; p < operands.pairs; ++p) {
    __m512bh columns[kVectors];
    for (Size j = 0; j < kVectors; ++j) {
      columns[j] = (__m512bh)_mm512_load_si512(b + j * sizeof(__m512));
    }
    const std::byte* const third = a + 3 * row;
    for (int r = 0; r < kRows; ++r) {
      const std::byte* const at =
          r < 3 ? a + static_cast<Size>(r) * row : third + static_cast<Size>(r - 3) * row;
      const auto pair = (__m512bh)_mm512_set1_epi32(pair_at(at));
      for (Size j = 0; j < kVectors; ++j) {
        sum[r][j] = _mm512_dpbf16_ps(sum[r][j], pair, columns[j]);
      }
    }
    a += operands.a_pair;
    b += kVectors * sizeof(__m512);
  }
  for (int r = 0; r < kRows; ++r) {
    for (Size j = 0; j < kVectors; ++j) {
      float* const to = sums + static_cast<Size>(r) * sum_row + j * kLanes;
      if (continues) sum[r][j] = _mm512_add_ps(_mm512_load_ps(to), sum[r][j]);
      _mm512_store_ps(to, sum[r][j]);
    }
  }
}

__m512 widened(__mmask16 mask, const void* halves) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, halves));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

__m512 old_values(__mmask16 mask, const float* values) {
  return _mm512_maskz_loadu_ps(mask, values);
}
__m512 old_values(__mmask16 mask, const Bf16* values) {
  return widened(mask, values);
}

void store(__mmask16 mask, __m512 values, bool streams, float* to) {
  if (streams && mask == 0xffffU) {
    _mm512_stream_ps(to, values);
  } else {
    _mm512_mask_storeu_ps(to, mask, values);
  }
}
void store(__mmask16 mask, __m512 values, bool /*streams*/, Bf16* to) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

template <class C>
void finish(const Bf16TileResult<C>& tile) {
  for (Size j = 0; j < tile.columns; j += kLanes) {
    const __mmask16 mask = floats_of(tile.columns - j);
    const __m512 bias = tile.bias == nullptr ? _mm512_setzero_ps() : widened(mask, tile.bias + j);
    for (Size r = 0; r < tile.rows; ++r) {
      C* const to = tile.values + r * tile.row_step + j;
      __m512 value = _mm512_load_ps(tile.sums + r * kBf16TileColumns + j);
      if (tile.bias != nullptr) value = _mm512_add_ps(value, bias);
      if (tile.adds) value = _mm512_add_ps(old_values(mask, to), value);
      store(mask, value, tile.streams, to);
    }
  }
}

void end_streams() {
  _mm_sfence();
}

void pair_rows(const Bf16* from, Size row_step, Size terms, Size width, Size to_width, Bf16* to) {
  alignas(64) std::uint16_t order[2 * kLanes];
  for (Size i = 0; i < kLanes; ++i) {
    order[2 * i] = static_cast<std::uint16_t>(i);
    order[2 * i + 1] = static_cast<std::uint16_t>(i + 2 * kLanes);
  }
  const __m512i lower = _mm512_load_si512(order);
  const __m512i upper = _mm512_add_epi16(lower, _mm512_set1_epi16(kLanes));
  for (Size term = 0; term < terms; term += 2, from += 2 * row_step) {
    for (Size i = 0; i < to_width; i += 2 * kLanes, to += 4 * kLanes) {
      const __mmask32 mask = halves_of(i < width ? width - i : 0);
      const __m512i first = _mm512_maskz_loadu_epi16(mask, from + i);
      const __m512i second = term + 1 < terms ? _mm512_maskz_loadu_epi16(mask, from + row_step + i)
                                              : _mm512_setzero_si512();
      _mm512_store_si512(to, _mm512_permutex2var_epi16(first, lower, second));
      _mm512_store_si512(to + 2 * kLanes, _mm512_permutex2var_epi16(first, upper, second));
    }
  }
}

/// Transposes a matrix of 16 x 16 words.
void transpose(__m512i (&rows)[kLanes]) {
  __m512i by_four[kLanes];
  for (Size i = 0; i < kLanes; i += 4) {
    const __m512i even_low = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    const __m512i even_high = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    const __m512i odd_low = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]);
    const __m512i odd_high = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
    by_four[i] = _mm512_unpacklo_epi64(even_low, odd_low);
    by_four[i + 1] = _mm512_unpackhi_epi64(even_low, odd_low);
    by_four[i + 2] = _mm512_unpacklo_epi64(even_high, odd_high);
    by_four[i + 3] = _mm512_unpackhi_epi64(even_high, odd_high);
  }
  for (Size i = 0; i < 4; ++i) {
    const __m512i first = _mm512_shuffle_i32x4(by_four[i], by_four[i + 4], 0x88);
    const __m512i second = _mm512_shuffle_i32x4(by_four[i], by_four[i + 4], 0xdd);
    const __m512i third = _mm512_shuffle_i32x4(by_four[i + 8], by_four[i + 12], 0x88);
    const __m512i fourth = _mm512_shuffle_i32x4(by_four[i + 8], by_four[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(first, third, 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(second, fourth, 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(first, third, 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(second, fourth, 0xdd);
  }
}

void pair_columns(const Bf16* from, Size row_step, Size terms, Size width, Bf16* to) {
  for (Size first = 0; first < kBf16TileColumns; first += kLanes) {
    for (Size term = 0; term < terms; term += 2 * kLanes) {
      const __mmask32 mask = halves_of(terms - term);
      __m512i rows[kLanes];
      for (Size i = 0; i < kLanes; ++i) {
        rows[i] = first + i < width
                      ? _mm512_maskz_loadu_epi16(mask, from + (first + i) * row_step + term)
                      : _mm512_setzero_si512();
      }
      transpose(rows);
      for (Size i = 0; i < kLanes && term + 2 * i < terms; ++i) {
        _mm512_store_si512(to + (term / 2 + i) * 2 * kBf16TileColumns + 2 * first, rows[i]);
      }
    }
  }
}

}  // namespace

const Bf16Kernels* bf16_kernels() {
  static constexpr Bf16Kernels kKernels = {
      {sum_tile<1>, sum_tile<2>, sum_tile<3>, sum_tile<4>, sum_tile<5>, sum_tile<6>},
      finish<float>,
      finish<Bf16>,
      end_streams,
      pair_rows,
      pair_columns};
  return &kKernels;
}

}  // namespace ballast::model::host
