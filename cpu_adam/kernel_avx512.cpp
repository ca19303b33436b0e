#include <immintrin.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

struct Avx512Lanes : VectorLanes<xsimd::avx512bw> {
  static Float fma(Float a, Float b, Float c) { return Float(_mm512_fmadd_ps(a, b, c)); }
  static Bits widen(const std::uint16_t* from) {
    return Bits(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  static void narrow(std::uint16_t* to, Bits value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
  }
};

}  // namespace

extern constinit const Variant kAvx512Variant = {Isa::avx512, run_split<Avx512Lanes>,
                                                 run_plain<Avx512Lanes>};

}  // namespace ballast::cpu_adam
