#include <arm_neon.h>

#include "cpu_adam/kernel.h"
#include "cpu_adam/kernel_vector.h"

namespace ballast::cpu_adam {
namespace {

struct NeonLanes : VectorLanes<xsimd::neon64> {
  static Float fma(Float a, Float b, Float c) { return Float(vfmaq_f32(c, a, b)); }
  static Float sqrt(Float value) { return Float(vsqrtq_f32(value)); }
  static Float divide(Float a, Float b) { return Float(vdivq_f32(a, b)); }
  static Float to_float(Bits value) { return Float(vcvtq_f32_u32(value)); }
  static Bits where_zero(Bits value, Bits yes, Bits no) {
    return Bits(vbslq_u32(vceqzq_u32(value), yes, no));
  }
  static Bits zero_where_nan(Float value, Bits bits) { return where_nan(value, pattern(0U), bits); }
  static Bits zero_where_zero(Bits value, Bits bits) {
    return where_zero(value, pattern(0U), bits);
  }
  static Bits widen(const std::uint16_t* from) { return Bits(vmovl_u16(vld1_u16(from))); }
  static Bits widen_upper(const std::uint16_t* from) { return widen(from) << 16; }
  static void narrow(std::uint16_t* to, Bits value) { vst1_u16(to, vmovn_u32(value)); }
  static void narrow_upper(std::uint16_t* to, Bits value) { vst1_u16(to, vshrn_n_u32(value, 16)); }
  static Bits pair(const std::uint16_t* low, const std::uint16_t* high) {
    const uint16x4x2_t halves = vzip_u16(vld1_u16(low), vld1_u16(high));
    return Bits(vreinterpretq_u32_u16(vcombine_u16(halves.val[0], halves.val[1])));
  }
  static void unpair(Bits value, std::uint16_t* low, std::uint16_t* high) {
    vst1_u16(low, vmovn_u32(value));
    vst1_u16(high, vshrn_n_u32(value, 16));
  }
  static Bits widen8(const std::uint8_t* from) {
    std::uint32_t four = 0;
    __builtin_memcpy(&four, from, sizeof four);
    const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return Bits(vmovl_u16(vget_low_u16(words)));
  }
  static void narrow8(std::uint8_t* to, Bits value) {
    const uint16x4_t words = vmovn_u32(value);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    __builtin_memcpy(to, &four, sizeof four);
  }
  static Float load_half(const std::uint16_t* from) {
    return Float(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
  }
  static void store_half(std::uint16_t* to, Float value) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }

  static Bits load_halves(const std::uint16_t* from) {
    return Bits(vreinterpretq_u32_u16(vld1q_u16(from)));
  }
  static void store_halves(std::uint16_t* to, Bits value) { vst1q_u16(to, halves(value)); }
  static Bits merge(Bits low, Bits high) { return Bits(vbslq_u32(pattern(0xffffU), low, high)); }
  static void separate(Float& first, Float& last) {
    const float32x4x2_t apart = vuzpq_f32(first, last);
    first = Float(apart.val[0]);
    last = Float(apart.val[1]);
  }
  static void join(Float& even, Float& odd) {
    const float32x4x2_t joined = vzipq_f32(even, odd);
    even = Float(joined.val[0]);
    odd = Float(joined.val[1]);
  }
  static void unpack_halves(Bits low, Bits high, Bits& first, Bits& last) {
    const uint16x8x2_t unpacked = vzipq_u16(halves(low), halves(high));
    first = of_halves(unpacked.val[0]);
    last = of_halves(unpacked.val[1]);
  }
  static void pack_halves(Bits first, Bits last, Bits& low, Bits& high) {
    const uint16x8x2_t packed = vuzpq_u16(halves(first), halves(last));
    low = of_halves(packed.val[0]);
    high = of_halves(packed.val[1]);
  }
  static Bits pack_uppers(Bits first, Bits last) {
    return of_halves(vcombine_u16(vshrn_n_u32(first, 16), vshrn_n_u32(last, 16)));
  }
  static void order_as_halves(Float&, Float&) {}
  static void order_as_floats(Float&, Float&) {}
  static Bits without_carries(Bits upper, Bits lower) {
    return of_halves(vsubq_u16(halves(upper), vshrq_n_u16(halves(lower), 15)));
  }
  static Bits with_carries(Bits upper, Bits lower) {
    const uint16x8_t limited = vminq_u16(halves(upper), vdupq_n_u16(0xfffe));
    const int16x8_t carries = vreinterpretq_s16_u16(vshrq_n_u16(halves(lower), 15));
    return of_halves(vreinterpretq_u16_s16(vqaddq_s16(vreinterpretq_s16_u16(limited), carries)));
  }
  template <bool has_sign>
  static Bits load_codes(const std::uint8_t* from) {
    const uint8x8_t bytes = vld1_u8(from);
    const int16x8_t extended = vmovl_s8(vreinterpret_s8_u8(bytes));
    return of_halves(has_sign ? vreinterpretq_u16_s16(extended) : vmovl_u8(bytes));
  }
  template <class Kind>
  static Bits add_where_coded(Bits values, Bits summand) {
    const uint16x8_t coded = vtstq_u16(halves(values), vdupq_n_u16(Kind::kLargest * 16));
    return of_halves(vaddq_u16(halves(values), vandq_u16(coded, halves(summand))));
  }
  template <class Kind>
  static void store_codes(Bits bases, const Bits (&uppers)[4], std::uint8_t* codes, Bits& lowest) {
    int16x8_t least = signed_halves(lowest);
    for (int i = 0; i < 4; ++i) {
      uint16x8_t magnitude = halves(uppers[i]);
      if (Kind::kSigned) magnitude = vandq_u16(magnitude, vdupq_n_u16(0x7fff));
      const uint16x8_t code = vsubq_u16(vshrq_n_u16(magnitude, 4), halves(bases));
      least = vminq_s16(least, vreinterpretq_s16_u16(code));
      uint8x8_t bytes = vmovn_u16(code);
      if (Kind::kSigned) {
        bytes = vbsl_u8(vdup_n_u8(0x80), vshrn_n_u16(halves(uppers[i]), 8), bytes);
      }
      vst1_u8(codes + 8 * i, bytes);
    }
    lowest = of_halves(vreinterpretq_u16_s16(least));
  }
  static bool none_below_two(Bits codes) { return vminvq_s16(signed_halves(codes)) >= 2; }

  struct Squares {
    float64x2_t sums[8] = {};
    void add(Float value, std::size_t part) {
      const float64x2_t low = vcvt_f64_f32(vget_low_f32(value));
      const float64x2_t high = vcvt_high_f64_f32(value);
      sums[2 * part] = vfmaq_f64(sums[2 * part], low, low);
      sums[2 * part + 1] = vfmaq_f64(sums[2 * part + 1], high, high);
    }
    void store(double* to) const {
      for (std::size_t i = 0; i < 8; ++i) vst1q_f64(to + 2 * i, sums[i]);
    }
  };

 private:
  static uint16x8_t halves(Bits value) { return vreinterpretq_u16_u32(value); }
  static int16x8_t signed_halves(Bits value) { return vreinterpretq_s16_u32(value); }
  static Bits of_halves(uint16x8_t value) { return Bits(vreinterpretq_u32_u16(value)); }
};

}  // namespace

extern constinit const Variant kNeonVariant = make_variant<NeonLanes>(Isa::neon);

}  // namespace ballast::cpu_adam
