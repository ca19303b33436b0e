#include "cpu_adam/kernel.h"

namespace ballast::cpu_adam {
namespace {

/// One lane of plain C++: the reference that the others are compared with. Where the target has no
/// FMA instruction the C library supplies a correctly rounded one, which is slow.
struct ScalarLanes {
  using Float = float;
  using Bits = std::uint32_t;
  static constexpr std::size_t kWidth = 1;

  static Float broadcast(float value) { return value; }
  static Bits pattern(std::uint32_t value) { return value; }
  static Float load(const float* from) { return *from; }
  static void store(float* to, Float value) { *to = value; }
  static Bits widen(const std::uint16_t* from) { return *from; }
  static void narrow(std::uint16_t* to, Bits value) { *to = static_cast<std::uint16_t>(value); }
  static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
  static Float sqrt(Float value) { return __builtin_sqrtf(value); }
  static Bits bits_of(Float value) { return __builtin_bit_cast(Bits, value); }
  static Float number_of(Bits value) { return __builtin_bit_cast(Float, value); }
  static Bits where_nan(Float value, Bits yes, Bits no) { return value != value ? yes : no; }
};

}  // namespace

extern constinit const Variant kScalarVariant = {Isa::scalar, run_split<ScalarLanes>,
                                                 run_plain<ScalarLanes>};

}  // namespace ballast::cpu_adam
