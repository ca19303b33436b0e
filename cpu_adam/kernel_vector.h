#pragma once

#include <cstddef>
#include <cstdint>

#include <xsimd/xsimd.hpp>

namespace ballast::cpu_adam {
namespace {

/// The part of `Lanes` (kernel.h) that is the same for every xsimd architecture. Left to each
/// kernel_*.cpp: fma, which xsimd 8.1 rounds twice on AVX-512 and SSE, and widen and narrow, which
/// it does through memory.
template <class Arch>
struct VectorLanes {
  using Float = xsimd::batch<float, Arch>;
  using Bits = xsimd::batch<std::uint32_t, Arch>;
  static constexpr std::size_t kWidth = Float::size;

  static Float broadcast(float value) { return Float(value); }
  static Bits pattern(std::uint32_t value) { return Bits(value); }
  static Float load(const float* from) { return Float::load_unaligned(from); }
  static void store(float* to, Float value) { value.store_unaligned(to); }
  static Float sqrt(Float value) { return xsimd::sqrt(value); }
  static Bits bits_of(Float value) { return xsimd::bitwise_cast<Bits>(value); }
  static Float number_of(Bits value) { return xsimd::bitwise_cast<Float>(value); }
  static Bits where_nan(Float value, Bits yes, Bits no) {
    const Float chosen = xsimd::select(xsimd::isnan(value), number_of(yes), number_of(no));
    return bits_of(chosen);
  }
};

}  // namespace
}  // namespace ballast::cpu_adam
