#include <immintrin.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

/// Permutations between 16 patterns and their 16 low halves followed by their 16 high halves.
alignas(64) constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
alignas(64) constexpr std::uint16_t kDeinterleave[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                         22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                         13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

struct Avx512Lanes : VectorLanes<xsimd::avx512bw> {
  static void stream(float* to, Float value) { _mm512_stream_ps(to, value); }
  static void end_streams() { _mm_sfence(); }
  static Float fma(Float a, Float b, Float c) { return Float(_mm512_fmadd_ps(a, b, c)); }
  static Float to_float(Bits value) { return Float(_mm512_cvtepi32_ps(value)); }
  static Bits where_zero(Bits value, Bits yes, Bits no) {
    return Bits(_mm512_mask_blend_epi32(_mm512_testn_epi32_mask(value, value), no, yes));
  }
  static Bits zero_where_nan(Float value, Bits bits) { return where_nan(value, pattern(0U), bits); }
  static Bits zero_where_zero(Bits value, Bits bits) {
    return where_zero(value, pattern(0U), bits);
  }
  static Bits widen(const std::uint16_t* from) { return Bits(_mm512_cvtepu16_epi32(load16(from))); }
  static Bits widen_upper(const std::uint16_t* from) { return widen(from) << 16; }
  static void narrow(std::uint16_t* to, Bits value) { store16(to, _mm512_cvtepi32_epi16(value)); }
  static void narrow_upper(std::uint16_t* to, Bits value) { narrow(to, value >> 16); }
  static Bits pair(const std::uint16_t* low, const std::uint16_t* high) {
    const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(load16(low)), load16(high), 1);
    return Bits(_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves));
  }
  static void unpair(Bits value, std::uint16_t* low, std::uint16_t* high) {
    const __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(kDeinterleave), value);
    store16(low, _mm512_castsi512_si256(halves));
    store16(high, _mm512_extracti64x4_epi64(halves, 1));
  }
  static Bits widen8(const std::uint8_t* from) {
    const auto* sixteen = reinterpret_cast<const __m128i*>(from);
    return Bits(_mm512_cvtepu8_epi32(_mm_loadu_si128(sixteen)));
  }
  static void narrow8(std::uint8_t* to, Bits value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value));
  }
  static Float load_half(const std::uint16_t* from) { return Float(_mm512_cvtph_ps(load16(from))); }
  static void store_half(std::uint16_t* to, Float value) {
    store16(to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static Bits merge(Bits low, Bits high) { return select<0xe4>(low, high, pattern(0xffffU)); }
  static void separate(Float& first, Float& last) {
    const Bits even = iota() << 1;
    const Float odds = Float(_mm512_permutex2var_ps(first, even + pattern(1U), last));
    first = Float(_mm512_permutex2var_ps(first, even, last));
    last = odds;
  }
  static void join(Float& even, Float& odd) {
    // Lanes of `odd` have the numbers from 16 on.
    const Bits order = (iota() >> 1) + ((iota() & pattern(1U)) << 4);
    const Float lasts = Float(_mm512_permutex2var_ps(even, order + pattern(8U), odd));
    even = Float(_mm512_permutex2var_ps(even, order, odd));
    odd = lasts;
  }
  static void unpack_halves(Bits low, Bits high, Bits& first, Bits& last) {
    first = Bits(_mm512_unpacklo_epi16(low, high));
    last = Bits(_mm512_unpackhi_epi16(low, high));
  }
  static void pack_halves(Bits first, Bits last, Bits& low, Bits& high) {
    const __m512i a = _mm512_shuffle_epi8(first, low_then_high());
    const __m512i b = _mm512_shuffle_epi8(last, low_then_high());
    low = Bits(_mm512_unpacklo_epi64(a, b));
    high = Bits(_mm512_unpackhi_epi64(a, b));
  }
  static Bits pack_uppers(Bits first, Bits last) {
    return Bits(_mm512_packus_epi32(first >> 16, last >> 16));
  }
  /// Groups of four floats with even numbers, then those with odd numbers.
  static void order_as_halves(Float& first, Float& last) {
    const Float odd = Float(_mm512_shuffle_f32x4(first, last, 0xdd));
    first = Float(_mm512_shuffle_f32x4(first, last, 0x88));
    last = odd;
  }
  static void order_as_floats(Float& first, Float& last) {
    const __m512 lows = _mm512_shuffle_f32x4(first, last, 0x44);
    const __m512 highs = _mm512_shuffle_f32x4(first, last, 0xee);
    first = Float(_mm512_shuffle_f32x4(lows, lows, 0xd8));
    last = Float(_mm512_shuffle_f32x4(highs, highs, 0xd8));
  }
  static Bits without_carries(Bits upper, Bits lower) {
    return Bits(_mm512_add_epi16(upper, _mm512_srai_epi16(lower, 15)));
  }
  static Bits with_carries(Bits upper, Bits lower) {
    const __m512i limited = _mm512_min_epu16(upper, _mm512_set1_epi16(-2));
    return Bits(_mm512_subs_epi16(limited, _mm512_srai_epi16(lower, 15)));
  }
  template <bool has_sign>
  static Bits load_codes(const std::uint8_t* from) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return Bits(has_sign ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
  }
  template <class Kind>
  static Bits add_where_coded(Bits halves, Bits summand) {
    const __mmask32 some = _mm512_test_epi16_mask(halves, _mm512_set1_epi16(Kind::kLargest * 16));
    return Bits(_mm512_mask_add_epi16(halves, some, halves, summand));
  }
  template <class Kind>
  static void store_codes(Bits bases, const Bits (&uppers)[1], std::uint8_t* codes, Bits& lowest) {
    __m512i halves = uppers[0];
    if constexpr (Kind::kSigned) halves = _mm512_and_si512(halves, in_memory<0x7fff7fff>());
    __m512i code = _mm512_sub_epi16(_mm512_srli_epi16(halves, 4), bases);
    lowest = Bits(_mm512_min_epi16(lowest, code));
    if constexpr (Kind::kSigned) {
      const Bits sign = Bits(_mm512_srli_epi16(uppers[0], 8));
      code = select<0xf8>(Bits(code), sign, in_memory<0x800080>());
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(code));
  }
  static bool none_below_two(Bits codes) {
    return _mm512_cmplt_epi16_mask(codes, _mm512_set1_epi16(2)) == 0;
  }

  struct Squares {
    __m512d low = _mm512_setzero_pd();
    __m512d high = _mm512_setzero_pd();
    void add(Float value, std::size_t) {
      const __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
      const __m512d last = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
      low = _mm512_fmadd_pd(first, first, low);
      high = _mm512_fmadd_pd(last, last, high);
    }
    void store(double* to) const {
      _mm512_storeu_pd(to, low);
      _mm512_storeu_pd(to + 8, high);
    }
  };

 private:
  static __m512i low_then_high() {
    return _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  }
  /// The truth table of three inputs; bit 4 of its index is `a`, bit 2 is `b`, bit 1 is `c`.
  template <int table>
  static Bits select(Bits a, Bits b, Bits c) {
    return Bits(_mm512_ternarylogic_epi32(a, b, c, table));
  }
  static __m256i load16(const std::uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void store16(std::uint16_t* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
};

}  // namespace

extern constinit const Variant kAvx512Variant = make_variant<Avx512Lanes>(Isa::avx512);

}  // namespace ballast::cpu_adam
