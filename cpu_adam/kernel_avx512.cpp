#include <immintrin.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

struct Avx512Lanes : VectorLanes<xsimd::avx512bw> {
  static Float fma(Float a, Float b, Float c) { return Float(_mm512_fmadd_ps(a, b, c)); }
  static Float to_float(Bits value) { return Float(_mm512_cvtepi32_ps(value)); }
  static Bits widen(const std::uint16_t* from) { return Bits(_mm512_cvtepu16_epi32(load16(from))); }
  static void narrow(std::uint16_t* to, Bits value) { store16(to, _mm512_cvtepi32_epi16(value)); }
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
