#include <immintrin.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

struct Avx2Lanes : VectorLanes<xsimd::fma3<xsimd::avx2>> {
  static void stream(float* to, Float value) { _mm256_stream_ps(to, value); }
  static void end_streams() { _mm_sfence(); }
  static Float fma(Float a, Float b, Float c) { return Float(_mm256_fmadd_ps(a, b, c)); }
  static Float to_float(Bits value) { return Float(_mm256_cvtepi32_ps(value)); }
  static Bits where_zero(Bits value, Bits yes, Bits no) {
    const __m256i zero = _mm256_cmpeq_epi32(value, _mm256_setzero_si256());
    return Bits(_mm256_blendv_epi8(no, yes, zero));
  }
  static Bits zero_where_nan(Float value, Bits bits) {
    const __m256 number = _mm256_cmp_ps(value, value, _CMP_ORD_Q);
    return Bits(_mm256_and_si256(_mm256_castps_si256(number), bits));
  }
  static Bits zero_where_zero(Bits value, Bits bits) {
    return Bits(_mm256_andnot_si256(_mm256_cmpeq_epi32(value, _mm256_setzero_si256()), bits));
  }
  static Bits widen(const std::uint16_t* from) { return Bits(_mm256_cvtepu16_epi32(load8(from))); }
  static Bits widen_upper(const std::uint16_t* from) {
    constexpr char kNone = -128;
    const __m256i order = _mm256_setr_epi8(
        kNone, kNone, 0, 1, kNone, kNone, 2, 3, kNone, kNone, 4, 5, kNone, kNone, 6, 7,  //
        kNone, kNone, 8, 9, kNone, kNone, 10, 11, kNone, kNone, 12, 13, kNone, kNone, 14, 15);
    return Bits(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load8(from)), order));
  }
  static void narrow(std::uint16_t* to, Bits value) {
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi32(0xffff));
    store8(to, packed(low));
  }
  static void narrow_upper(std::uint16_t* to, Bits value) {
    const __m256i uppers =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(value, low_then_high()), 0x0d);
    store8(to, _mm256_castsi256_si128(uppers));
  }
  static Bits pair(const std::uint16_t* low, const std::uint16_t* high) {
    const __m128i lows = load8(low);
    const __m128i highs = load8(high);
    return Bits(_mm256_set_m128i(_mm_unpackhi_epi16(lows, highs), _mm_unpacklo_epi16(lows, highs)));
  }
  static void unpair(Bits value, std::uint16_t* low, std::uint16_t* high) {
    const __m256i halves =
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8(value, low_then_high()), 0xd8);
    store8(low, _mm256_castsi256_si128(halves));
    store8(high, _mm256_extracti128_si256(halves, 1));
  }
  static Bits widen8(const std::uint8_t* from) {
    const auto* eight = reinterpret_cast<const __m128i*>(from);
    return Bits(_mm256_cvtepu8_epi32(_mm_loadl_epi64(eight)));
  }
  static void narrow8(std::uint8_t* to, Bits value) {
    const __m128i words = packed(_mm256_and_si256(value, _mm256_set1_epi32(0xff)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }
  static Float load_half(const std::uint16_t* from) { return Float(_mm256_cvtph_ps(load8(from))); }
  static void store_half(std::uint16_t* to, Float value) {
    store8(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static Bits merge(Bits low, Bits high) { return Bits(_mm256_blend_epi16(low, high, 0xaa)); }
  static void separate(Float& first, Float& last) {
    const __m256 lows = _mm256_permute2f128_ps(first, last, 0x20);
    const __m256 highs = _mm256_permute2f128_ps(first, last, 0x31);
    first = Float(_mm256_shuffle_ps(lows, highs, 0x88));
    last = Float(_mm256_shuffle_ps(lows, highs, 0xdd));
  }
  static void join(Float& even, Float& odd) {
    const __m256 lows = _mm256_unpacklo_ps(even, odd);
    const __m256 highs = _mm256_unpackhi_ps(even, odd);
    even = Float(_mm256_permute2f128_ps(lows, highs, 0x20));
    odd = Float(_mm256_permute2f128_ps(lows, highs, 0x31));
  }
  static void unpack_halves(Bits low, Bits high, Bits& first, Bits& last) {
    first = Bits(_mm256_unpacklo_epi16(low, high));
    last = Bits(_mm256_unpackhi_epi16(low, high));
  }
  static void pack_halves(Bits first, Bits last, Bits& low, Bits& high) {
    const __m256i a = _mm256_shuffle_epi8(first, low_then_high());
    const __m256i b = _mm256_shuffle_epi8(last, low_then_high());
    low = Bits(_mm256_unpacklo_epi64(a, b));
    high = Bits(_mm256_unpackhi_epi64(a, b));
  }
  static Bits pack_uppers(Bits first, Bits last) {
    return Bits(_mm256_packus_epi32(first >> 16, last >> 16));
  }
  /// Exchanges the upper four floats of `first` with the lower four of `last`.
  static void order_as_halves(Float& first, Float& last) {
    const __m256 lows = _mm256_permute2f128_ps(first, last, 0x20);
    last = Float(_mm256_permute2f128_ps(first, last, 0x31));
    first = Float(lows);
  }
  static void order_as_floats(Float& first, Float& last) { order_as_halves(first, last); }
  static Bits without_carries(Bits upper, Bits lower) {
    return Bits(_mm256_add_epi16(upper, carries(lower)));
  }
  static Bits with_carries(Bits upper, Bits lower) {
    const __m256i limited = _mm256_min_epu16(upper, in_memory<0xfffefffeU>());
    return Bits(_mm256_subs_epi16(limited, carries(lower)));
  }
  template <bool has_sign>
  static Bits load_codes(const std::uint8_t* from) {
    const __m128i bytes = load16(from);
    return Bits(has_sign ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
  }
  template <class Kind>
  static Bits add_where_coded(Bits halves, Bits summand) {
    __m256i codes = halves;  // without signs, because those change the sign of the summand
    if constexpr (Kind::kSigned) codes = _mm256_and_si256(codes, _mm256_set1_epi16(0x7fff));
    return Bits(_mm256_add_epi16(halves, _mm256_sign_epi16(summand, codes)));
  }
  template <class Kind>
  static void store_codes(Bits bases, const Bits (&uppers)[2], std::uint8_t* codes, Bits& lowest) {
    const auto code_of = [bases](__m256i halves) {
      if constexpr (Kind::kSigned) halves = _mm256_and_si256(halves, in_memory<0x7fff7fff>());
      return _mm256_sub_epi16(_mm256_srli_epi16(halves, 4), bases);
    };
    __m256i bytes = _mm256_packus_epi16(code_of(uppers[0]), code_of(uppers[1]));
    lowest = Bits(_mm256_min_epu8(lowest, bytes));
    if constexpr (Kind::kSigned) {
      const __m256i signs = _mm256_packs_epi16(uppers[0], uppers[1]);
      bytes = _mm256_or_si256(bytes, _mm256_and_si256(signs, in_memory<0x80808080U>()));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permute4x64_epi64(bytes, 0xd8));
  }
  static bool none_below_two(Bits codes) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i below = _mm256_cmpeq_epi8(_mm256_min_epu8(codes, ones), codes);
    return _mm256_movemask_epi8(below) == 0;
  }

  struct Squares {
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                       _mm256_setzero_pd()};
    void add(Float value, std::size_t part) {
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
      sums[2 * part] = _mm256_fmadd_pd(low, low, sums[2 * part]);
      sums[2 * part + 1] = _mm256_fmadd_pd(high, high, sums[2 * part + 1]);
    }
    void store(double* to) const {
      for (std::size_t i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, sums[i]);
    }
  };

 private:
  /// -1 where a half has its highest bit set. A CPU starts more comparisons per cycle than shifts.
  static __m256i carries(__m256i halves) {
    return _mm256_cmpgt_epi16(_mm256_setzero_si256(), halves);
  }
  static __m128i load8(const std::uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static __m128i load16(const std::uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static __m256i low_then_high() {
    return _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                            0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  }
  static void store8(std::uint16_t* to, __m128i value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
  /// The low 16 bits of eight numbers below 2^16.
  static __m128i packed(__m256i low) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08));
  }
};

}  // namespace

extern constinit const Variant kAvx2Variant = make_variant<Avx2Lanes>(Isa::avx2);

}  // namespace ballast::cpu_adam
