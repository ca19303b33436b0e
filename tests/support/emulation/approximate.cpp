#include "tests/support/emulation/approximate.h"

#include <bit>
#include <cmath>
#include <limits>

#include <dlfcn.h>

#include "tests/support/emulation/settings.h"

namespace ballast::test::emulation {
namespace {

thread_local unsigned kernels_here = 0;

/// Mixes bits. Source: Steele et al., "Fast splittable pseudorandom number generators", 2014.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30U) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27U) * 0x94d049bb133111ebU;
  return x ^ x >> 31U;
}

enum Function : std::uint64_t {
  kPowerOfTwo = 1,
  kQuickExponential,
  kQuickQuotient,
  kExpf,
  kExp2f,
  kLogf,
  kLog1pf,
  kErff,
  kExp,
  kLog,
  kLog1p,
  kSin,
  kCos,
};

/// A number from -1 to 1 that the seed, the function and the argument's bits decide. Every fourth
/// one is an end of the interval.
double draw(Function function, std::uint64_t bits) {
  const std::uint64_t random = mixed(mixed(seeds().arithmetic ^ function << 56U) ^ bits);
  const double sign = (random & 1U) == 0 ? 1.0 : -1.0;
  if ((random >> 1U & 3U) == 0) return sign;
  return sign * static_cast<double>(random >> 11U) * 0x1p-53;
}

bool is_special(double result) {
  return !std::isfinite(result) || result == 0.0;
}

/// Moves a result by up to `ulps` units in its last place, except inf, NaN and 0. An exact 1 or -1
/// stays: exp(0) is exact, and erf reaches its limits.
template <class T>
T moved(T exact, double ulps, Function function, std::uint64_t bits) {
  if (is_special(exact) || std::abs(exact) == T(1)) return exact;
  const double steps = std::trunc(draw(function, bits) * (ulps + 0.999));
  T result = exact;
  const T towards =
      steps > 0.0 ? std::numeric_limits<T>::infinity() : -std::numeric_limits<T>::infinity();
  for (double done = 0.0; done < std::abs(steps); ++done) result = std::nextafter(result, towards);
  return result;
}
std::uint64_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
std::uint64_t bits_of(double x) {
  return std::bit_cast<std::uint64_t>(x);
}

bool is_approximate() {
  return kernels_here > 0 && seeds().arithmetic != 0;
}

/// Defines how a tensor core adds, from the seed.
struct Adding {
  unsigned first;    ///< product with which it starts
  unsigned step;     ///< an odd number: distance of the next product
  unsigned at_once;  ///< products that are added up before they are added to the sum
  bool truncates;    ///< sums are rounded toward zero

  explicit Adding(std::uint64_t seed) {
    const std::uint64_t random = mixed(seed);
    first = static_cast<unsigned>(random & 15U);
    step = static_cast<unsigned>(random >> 4U & 15U) | 1U;
    at_once = 1U << (random >> 8U & 3U) << (random >> 10U & 1U);
    truncates = (random >> 11U & 1U) != 0;
  }
  [[nodiscard]] float plus(float a, float b) const {
    const float nearest = a + b;
    if (!truncates || !std::isfinite(nearest)) return nearest;
    const double exact = static_cast<double>(a) + static_cast<double>(b);
    return std::abs(static_cast<double>(nearest)) > std::abs(exact) ? std::nextafter(nearest, 0.0F)
                                                                    : nearest;
  }
};

}  // namespace

InKernel::InKernel() {
  ++kernels_here;
}
InKernel::~InKernel() {
  --kernels_here;
}

float power_of_two(float x) {
  if (seeds().arithmetic == 0) return std::exp2(x);
  const double exact = std::exp2(static_cast<double>(x));
  if (is_special(exact) || x == 0.0F) return static_cast<float>(exact);
  const double near = exact * (1.0 + draw(kPowerOfTwo, bits_of(x)) * 0x0.ffp-22);
  return near < 0x1p-126 ? 0.0F : static_cast<float>(near);
}

float quick_exponential(float x) {
  if (seeds().arithmetic == 0) return std::exp(x);
  const auto exact = static_cast<float>(std::exp(static_cast<double>(x)));
  return moved(exact, 2.0 + std::floor(std::abs(1.173 * static_cast<double>(x))), kQuickExponential,
               bits_of(x));
}

float quick_quotient(float x, float y) {
  if (seeds().arithmetic == 0) return x / y;
  if (std::isfinite(y) && std::abs(y) > 0x1p126F) {
    return std::isinf(x) ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
  }
  return moved(x / y, 2.0, kQuickQuotient, bits_of(x) << 32U | bits_of(y));
}

float sum_in_some_order(float sum, const float (&products)[16]) {
  const std::uint64_t seed = seeds().arithmetic;
  thread_local std::uint64_t known = 0;
  thread_local Adding how(0);
  if (known != seed) {
    how = Adding(seed);
    known = seed;
  }
  for (unsigned start = 0; start < 16; start += how.at_once) {
    float some = 0.0F;
    for (unsigned i = start; i < start + how.at_once; ++i) {
      some = how.plus(some, products[(how.first + i * how.step) % 16]);
    }
    sum = how.plus(sum, some);
  }
  return sum;
}

}  // namespace ballast::test::emulation

// Functions of the C library, with a GPU's error inside kernels. Units in the last place: NVIDIA,
// "CUDA C++ Programming Guide", tables of single and double precision functions.
#define BALLAST_APPROXIMATE(type, name, ulps, function)                                 \
  extern "C" type name(type x) noexcept {                                               \
    namespace emulation = ballast::test::emulation;                                     \
    static const auto real = reinterpret_cast<type (*)(type)>(dlsym(RTLD_NEXT, #name)); \
    const type exact = real(x);                                                         \
    if (!emulation::is_approximate()) return exact;                                     \
    return emulation::moved(exact, ulps, emulation::function, emulation::bits_of(x));   \
  }

BALLAST_APPROXIMATE(float, expf, 2.0, kExpf)
BALLAST_APPROXIMATE(float, exp2f, 2.0, kExp2f)
BALLAST_APPROXIMATE(float, logf, 1.0, kLogf)
BALLAST_APPROXIMATE(float, log1pf, 1.0, kLog1pf)
BALLAST_APPROXIMATE(float, erff, 2.0, kErff)
BALLAST_APPROXIMATE(double, exp, 1.0, kExp)
BALLAST_APPROXIMATE(double, log, 1.0, kLog)
BALLAST_APPROXIMATE(double, log1p, 1.0, kLog1p)
BALLAST_APPROXIMATE(double, sin, 2.0, kSin)
BALLAST_APPROXIMATE(double, cos, 2.0, kCos)

/// The compiler combines a sine and a cosine of one angle.
extern "C" void sincos(double x, double* sine, double* cosine) noexcept {
  *sine = sin(x);
  *cosine = cos(x);
}
