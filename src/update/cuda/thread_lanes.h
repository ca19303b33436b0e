#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "ballast/core/dtype.h"

#include "src/device/cuda/kernel_language.h"

namespace ballast::update::cuda {

/// A float whose operations are rounded separately; nvcc would fuse plain products and sums.
struct Rounded {
  float value;
};
__host__ __device__ inline Rounded operator+(Rounded a, Rounded b) {
  return {device::rounded_sum(a.value, b.value)};
}
__host__ __device__ inline Rounded operator-(Rounded a, Rounded b) {
  return {device::rounded_difference(a.value, b.value)};
}
__host__ __device__ inline Rounded operator*(Rounded a, Rounded b) {
  return {device::rounded_product(a.value, b.value)};
}

/// One GPU lane with the interface that cpu_adam/kernel.h requires. Denormals are kept (nvcc's
/// default). Payload and sign of NaNs are those of the GPU.
struct ThreadLanes {
  using Float = Rounded;
  using Bits = std::uint32_t;
  static constexpr std::size_t kWidth = 1;

  static constexpr Float broadcast(float value) { return {value}; }
  static constexpr Bits pattern(std::uint32_t value) { return value; }
  static constexpr Bits iota() { return 0; }
  static constexpr Float load(const float* from) { return {*from}; }
  static constexpr void store(float* to, Float value) { *to = value.value; }
  static constexpr Bits widen(const std::uint16_t* from) { return *from; }
  static constexpr Bits widen_upper(const std::uint16_t* from) { return widen(from) << 16U; }
  static constexpr void narrow(std::uint16_t* to, Bits value) {
    *to = static_cast<std::uint16_t>(value);
  }
  static constexpr Bits pair(const std::uint16_t* low, const std::uint16_t* high) {
    return (static_cast<std::uint32_t>(*high) << 16U) | *low;
  }
  static constexpr void unpair(Bits value, std::uint16_t* low, std::uint16_t* high) {
    narrow(low, value);
    narrow(high, value >> 16U);
  }
  static constexpr Float load_half(const std::uint16_t* from) {
    return {ballast::to_float(F16{*from})};
  }
  static constexpr void store_half(std::uint16_t* to, Float value) {
    *to = to_f16(value.value).bits;
  }
  __host__ __device__ static Float fma(Float a, Float b, Float c) {
    return {device::rounded_fma(a.value, b.value, c.value)};
  }
  __host__ __device__ static Float sqrt(Float value) { return {device::rounded_root(value.value)}; }
  __host__ __device__ static Float divide(Float a, Float b) {
    return {device::rounded_quotient(a.value, b.value)};
  }
  static constexpr Bits bits_of(Float value) { return std::bit_cast<Bits>(value.value); }
  static constexpr Float number_of(Bits value) { return {std::bit_cast<float>(value)}; }
  static constexpr Float to_float(Bits value) { return {static_cast<float>(value)}; }
  static constexpr Bits larger(Bits a, Bits b) { return a > b ? a : b; }
  static constexpr Bits where_nan(Float value, Bits yes, Bits no) {
    return value.value != value.value ? yes : no;
  }
  static constexpr Bits where_zero(Bits value, Bits yes, Bits no) { return value == 0 ? yes : no; }
  static constexpr Bits zero_where_nan(Float value, Bits bits) {
    return where_nan(value, pattern(0U), bits);
  }
  static constexpr Bits zero_where_zero(Bits value, Bits bits) {
    return where_zero(value, pattern(0U), bits);
  }
  static constexpr Bits where_less(Float a, Float b, Bits yes, Bits no) {
    return a.value < b.value ? yes : no;
  }
};

}  // namespace ballast::update::cuda
