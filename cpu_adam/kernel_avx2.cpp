#include <immintrin.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

struct Avx2Lanes : VectorLanes<xsimd::fma3<xsimd::avx2>> {
  static Float fma(Float a, Float b, Float c) { return Float(_mm256_fmadd_ps(a, b, c)); }
  static Bits widen(const std::uint16_t* from) {
    return Bits(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static void narrow(std::uint16_t* to, Bits value) {
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
};

}  // namespace

extern constinit const Variant kAvx2Variant = {Isa::avx2, run_split<Avx2Lanes>,
                                               run_plain<Avx2Lanes>};

}  // namespace ballast::cpu_adam
