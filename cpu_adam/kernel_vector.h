#pragma once

#include <cstddef>
#include <cstdint>

#include <xsimd/xsimd.hpp>

namespace ballast::cpu_adam {
namespace {

/// The part of `Lanes` (kernel.h) that all xsimd architectures share. Each kernel_*.cpp adds fma,
/// which xsimd 8.1 rounds twice on AVX-512 and SSE, conversions between widths, which xsimd does
/// through memory or not at all, and Squares. Its sqrt and division on NEON are approximations.
template <class Arch>
struct VectorLanes {
  using Float = xsimd::batch<float, Arch>;
  using Bits = xsimd::batch<std::uint32_t, Arch>;
  static constexpr std::size_t kWidth = Float::size;

  static Float broadcast(float value) { return Float(value); }
  static Bits pattern(std::uint32_t value) { return Bits(value); }
  /// A constant that is loaded where it is used. gcc would build it again in each iteration of a
  /// loop if registers do not suffice.
  template <std::uint32_t value>
  static Bits in_memory() {
    static constexpr std::uint32_t kValue = value;
    const std::uint32_t* from = &kValue;
    asm("" : "+r"(from));
    return Bits(*from);
  }
  static Bits iota() {
    std::uint32_t numbers[kWidth];
    for (std::size_t i = 0; i < kWidth; ++i) numbers[i] = static_cast<std::uint32_t>(i);
    return Bits::load_unaligned(numbers);
  }
  static Float load(const float* from) { return Float::load_unaligned(from); }
  static void store(float* to, Float value) { value.store_unaligned(to); }
  static void stream(float* to, Float value) { store(to, value); }
  static void end_streams() {}
  static Bits load_halves(const std::uint16_t* from) {
    return Bits::load_unaligned(reinterpret_cast<const std::uint32_t*>(from));
  }
  static void store_halves(std::uint16_t* to, Bits value) {
    value.store_unaligned(reinterpret_cast<std::uint32_t*>(to));
  }
  static Float sqrt(Float value) { return xsimd::sqrt(value); }
  static Float divide(Float a, Float b) { return a / b; }
  static Bits bits_of(Float value) { return xsimd::bitwise_cast<Bits>(value); }
  static Float number_of(Bits value) { return xsimd::bitwise_cast<Float>(value); }
  static Bits larger(Bits a, Bits b) { return xsimd::max(a, b); }
  static Bits where_nan(Float value, Bits yes, Bits no) {
    return bits_of(xsimd::select(xsimd::isnan(value), number_of(yes), number_of(no)));
  }
  static Bits where_less(Float a, Float b, Bits yes, Bits no) {
    return bits_of(xsimd::select(a < b, number_of(yes), number_of(no)));
  }
};

}  // namespace
}  // namespace ballast::cpu_adam
