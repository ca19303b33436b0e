#include "ballast/core/dtype.h"

#include "cpu_adam/kernel.h"

namespace ballast::cpu_adam {
namespace {

/// One lane of plain C++, the reference for the other variants. Without an FMA instruction the C
/// library supplies a correctly rounded, slow one.
struct ScalarLanes {
  using Float = float;
  using Bits = std::uint32_t;
  static constexpr std::size_t kWidth = 1;

  static Float broadcast(float value) { return value; }
  static Bits pattern(std::uint32_t value) { return value; }
  static Bits iota() { return 0; }
  /// Like vectors, these take any address.
  static Float load(const void* from) {
    Float value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  static void store(void* to, Float value) { __builtin_memcpy(to, &value, sizeof value); }
  static void stream(void* to, Float value) { store(to, value); }
  static void end_streams() {}
  static Bits widen(const std::uint16_t* from) { return *from; }
  static Bits widen_upper(const std::uint16_t* from) { return widen(from) << 16; }
  static void narrow(std::uint16_t* to, Bits value) { *to = static_cast<std::uint16_t>(value); }
  static void narrow_upper(std::uint16_t* to, Bits value) { narrow(to, value >> 16); }
  static Bits pair(const std::uint16_t* low, const std::uint16_t* high) {
    return (static_cast<std::uint32_t>(*high) << 16) | *low;
  }
  static void unpair(Bits value, std::uint16_t* low, std::uint16_t* high) {
    narrow(low, value);
    narrow(high, value >> 16);
  }
  static Bits widen8(const std::uint8_t* from) { return *from; }
  static void narrow8(std::uint8_t* to, Bits value) { *to = static_cast<std::uint8_t>(value); }
  static Float load_half(const std::uint16_t* from) { return ballast::to_float(F16{*from}); }
  static void store_half(std::uint16_t* to, Float value) { *to = to_f16(value).bits; }
  static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
  static Float sqrt(Float value) { return __builtin_sqrtf(value); }
  static Float divide(Float a, Float b) { return a / b; }
  static Bits bits_of(Float value) { return __builtin_bit_cast(Bits, value); }
  static Float number_of(Bits value) { return __builtin_bit_cast(Float, value); }
  static Float to_float(Bits value) { return static_cast<float>(value); }
  static Bits larger(Bits a, Bits b) { return a > b ? a : b; }
  static Bits where_nan(Float value, Bits yes, Bits no) { return value != value ? yes : no; }
  static Bits where_zero(Bits value, Bits yes, Bits no) { return value == 0 ? yes : no; }
  static Bits zero_where_nan(Float value, Bits bits) { return where_nan(value, pattern(0U), bits); }
  static Bits zero_where_zero(Bits value, Bits bits) {
    return where_zero(value, pattern(0U), bits);
  }
  static void separate(Float&, Float&) {}
  static Bits where_less(Float a, Float b, Bits yes, Bits no) { return a < b ? yes : no; }

  struct Squares {
    double sums[16] = {};
    void add(Float value, std::size_t part) {
      sums[part] += static_cast<double>(value) * static_cast<double>(value);
    }
    void store(double* to) const { __builtin_memcpy(to, sums, sizeof sums); }
  };
};

}  // namespace

extern constinit const Variant kScalarVariant = make_variant<ScalarLanes>(Isa::scalar);

}  // namespace ballast::cpu_adam
