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

  /// Codes are words here, 16 in a vector: the upper halves of the patterns that they stand for are
  /// 16 * (code + base), with the sign in front.
  template <class Kind>
  static void expand_codes(const std::uint8_t* codes, Bits base, Float (&numbers)[2]) {
    const __m256i bytes = _mm256_broadcastsi128_si256(load16(codes));
    // Puts elements 0 to 3 and 8 to 11 into one half, which unpacking then separates. A signed code
    // fills both bytes of its word, so that its sign is where the pattern has it.
    constexpr char kNone = Kind::kSigned ? 0 : -128;
    const auto in_both = [](char element) { return static_cast<char>(element | kNone); };
    const __m256i order = _mm256_setr_epi8(
        0, in_both(0), 1, in_both(1), 2, in_both(2), 3, in_both(3), 8, in_both(8), 9, in_both(9),
        10, in_both(10), 11, in_both(11), 4, in_both(4), 5, in_both(5), 6, in_both(6), 7,
        in_both(7), 12, in_both(12), 13, in_both(13), 14, in_both(14), 15, in_both(15));
    const __m256i zero = _mm256_setzero_si256();
    const __m256i words = _mm256_shuffle_epi8(bytes, order);
    const __m256i code = _mm256_and_si256(words, _mm256_set1_epi16(Kind::kLargest));
    const __m256i none = _mm256_cmpeq_epi16(code, zero);
    const __m256i number = _mm256_slli_epi16(_mm256_add_epi16(code, in_words(base)), 4);
    __m256i upper = _mm256_andnot_si256(none, number);
    if constexpr (Kind::kSigned) {
      upper = _mm256_or_si256(upper, _mm256_and_si256(words, _mm256_set1_epi16(-0x8000)));
    }
    numbers[0] = number_of(Bits(_mm256_unpacklo_epi16(zero, upper)));
    numbers[1] = number_of(Bits(_mm256_unpackhi_epi16(zero, upper)));
  }
  /// Returns false if the block is NaN or if some number may be below the smallest code, which is
  /// rare: kernel_codes.h then compresses each.
  template <class Kind>
  static bool compress_codes(const CodeScale<Avx2Lanes, Kind>& scale, const float* from,
                             const Draws<Avx2Lanes>& draws, std::uint8_t* codes) {
    if (scale.all_nan) return false;
    const __m256i base = in_words(scale.base);
    __m256i words[2];
    for (std::size_t i = 0; i < 2; ++i) {
      const Bits even = rounded_for<Kind>(from + 16 * i, draws.bits[2 * i]);
      const Bits odd = rounded_for<Kind>(from + 16 * i + 8, draws.bits[2 * i + 1]);
      words[i] = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    }
    const auto code_of = [base](__m256i upper) {
      const __m256i magnitude = _mm256_and_si256(upper, in_memory<0x7fff7fff>());
      return _mm256_sub_epi16(_mm256_srli_epi16(magnitude, 4), base);
    };
    __m256i bytes = _mm256_packus_epi16(code_of(words[0]), code_of(words[1]));
    const __m256i one = in_memory<0x01010101>();
    const __m256i small = _mm256_cmpeq_epi8(_mm256_min_epu8(bytes, one), bytes);
    if (_mm256_movemask_epi8(small) != 0) return false;
    if constexpr (Kind::kSigned) {
      const __m256i signs = _mm256_packs_epi16(words[0], words[1]);
      bytes = _mm256_or_si256(bytes, _mm256_and_si256(signs, in_memory<0x80808080U>()));
    }
    // Even and odd elements of two vectors alternate in each half.
    const __m256i fours = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m256i ordered = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(bytes, fours),
                                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
    return true;
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
  /// A constant that is loaded where it is used. gcc would build it again in each iteration.
  template <std::uint32_t value>
  static __m256i in_memory() {
    static constexpr std::uint32_t kValue = value;
    const std::uint32_t* from = &kValue;
    asm("" : "+r"(from));
    return _mm256_set1_epi32(static_cast<int>(*from));
  }
  /// The low half of each pattern in both of its halves.
  static __m256i in_words(Bits value) {
    return _mm256_blend_epi16(value, _mm256_slli_epi32(value, 16), 0xaa);
  }
  /// Eight patterns with their random bits added below the code, as compress_code() does.
  template <class Kind>
  static Bits rounded_for(const float* from, Bits draws) {
    // Shifts the 16 random bits to bit 4.
    const Bits shifted = Kind::kRandomShift == 0 ? draws << 4 : draws >> (Kind::kRandomShift - 4);
    return bits_of(load(from)) + (shifted & Bits(in_memory<0xffff0>())) + Bits(in_memory<8>());
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
