#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/updater.h"

#include "cpu_adam/arguments.h"
#include "cpu_adam/kernel_rules.h"

namespace ballast::cpu_adam {
namespace {

/// Unit roundoff of float; the excess covers products of errors and the roundings of double.
constexpr double kUnit = 0x1p-24 * (1.0 + 0x1p-12);
/// More than the rounding error of a denormal.
constexpr double kTiny = 0x1p-149;
/// Magnitudes from here on round to infinity in float.
constexpr double kOverflow = 0x1.ffffffp127;

/// A number computed in double, and how far from it the same computation in float may be:
/// Wilkinson's running error analysis. Source: Higham, "Accuracy and stability of numerical
/// algorithms", 2nd edition, section 3.3.
struct BoundedNumber {
  double value = 0.0;
  double error = 0.0;
};

/// The result of one operation in float. `carried` is the error of its operands.
BoundedNumber rounded(double value, double carried) {
  if (value == 0.0 && carried == 0.0) return {};  // exact
  if (std::fabs(value) >= kOverflow) value = std::copysign(INFINITY, value);
  if (!std::isfinite(value)) return {value, 0.0};
  return {value, carried + kUnit * (std::fabs(value) + carried) + kTiny};
}

double product_error(BoundedNumber a, BoundedNumber b) {
  return std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error;
}

BoundedNumber operator+(BoundedNumber a, BoundedNumber b) {
  return rounded(a.value + b.value, a.error + b.error);
}
BoundedNumber operator-(BoundedNumber a, BoundedNumber b) {
  return rounded(a.value - b.value, a.error + b.error);
}
BoundedNumber operator*(BoundedNumber a, BoundedNumber b) {
  return rounded(a.value * b.value, product_error(a, b));
}

/// One lane for the rules. A sign that rounding decides is `unclear_sign`.
template <int unclear_sign>
struct BoundedLanes {
  using Float = BoundedNumber;

  /// A scalar computed in double, which kernels round to float once.
  static Float broadcast(double value) {
    return static_cast<double>(static_cast<float>(value)) == value ? Float{value}
                                                                   : rounded(value, 0.0);
  }
  static Float fma(Float a, Float b, Float c) {
    return rounded(a.value * b.value + c.value, product_error(a, b) + c.error);
  }
  static Float divide(Float a, Float b) {
    const double quotient = a.value / b.value;
    const double least = std::fabs(b.value) - b.error;
    if (least <= 0.0) return rounded(quotient, INFINITY);
    return rounded(quotient, (a.error + std::fabs(quotient) * b.error) / least);
  }
  /// |sqrt(x) - sqrt(y)| is |x - y| / (sqrt(x) + sqrt(y)), and no more than sqrt(|x - y|).
  static Float sqrt(Float a) {
    const double root = std::sqrt(a.value);
    const double steep = std::sqrt(a.error);
    return rounded(root, root > steep ? a.error / root : steep);
  }
  static Float sign(Float x) {
    if (std::isnan(x.value) || (x.value == 0.0 && x.error == 0.0)) return x;
    if (std::fabs(x.value) > x.error) return {std::copysign(1.0, x.value)};
    return {unclear_sign};
  }
  static Float magnitude(Float x) { return {std::fabs(x.value), x.error}; }
  static Float maximum(Float a, Float b) {
    const double larger = a.value > b.value || std::isnan(a.value) ? a.value : b.value;
    return {larger, std::fmax(a.error, b.error)};
  }
  static Float zero_where_equal(Float x, Float least) {
    if (x.value - x.error > least.value + least.error) return x;
    return {x.value, x.value + x.error};  // either one
  }
};

/// The result of one update before the moments are rounded to their format.
struct Expected {
  BoundedNumber weight, first, second;
};

/// An element, for a rule.
struct BoundedGroup {
  const Element& before;
  double gradient_scale;
  Expected& after;

  [[nodiscard]] BoundedNumber gradient() const {
    return BoundedNumber{before.gradient} * BoundedNumber{gradient_scale};
  }
  [[nodiscard]] BoundedNumber first() const { return {before.first}; }
  [[nodiscard]] BoundedNumber second() const { return {before.second}; }
  [[nodiscard]] BoundedNumber weight() const { return {before.weight}; }
  void set_first(BoundedNumber value) const { after.first = value; }
  void set_second(BoundedNumber value) const { after.second = value; }
  void set_weight(BoundedNumber value) const { after.weight = value; }
};

template <int unclear_sign>
Expected updated(const Hyper& hyper, const Scalars<double>& scalars, const Element& before) {
  using Lanes = BoundedLanes<unclear_sign>;
  Expected after;
  with_rule(hyper.optimizer, [&]<class Rule>(Rule) {
    const BoundedGroup at = {before, scalars.gradient_scale, after};
    Rule::template apply<Lanes>(Constants<Lanes>(scalars), at);
  });
  return after;
}

/// The distance of neighbours around `magnitude` among numbers with `bits` significant bits, the
/// smallest positive of which is `smallest`.
double spacing(double magnitude, int bits, double smallest) {
  if (magnitude < smallest || magnitude == 0.0) return smallest;
  if (!std::isfinite(magnitude)) return std::numeric_limits<double>::infinity();
  return std::ldexp(1.0, std::ilogb(magnitude) - (bits - 1));
}

/// `exact` rounded up or down to one of its two neighbours (spacing()).
BoundedNumber stored(BoundedNumber exact, int bits, double smallest) {
  if (!std::isfinite(exact.value)) return exact;
  const double most = std::fabs(exact.value) + exact.error;
  return {exact.value, exact.error + spacing(most, bits, smallest)};
}

/// The distance in units of the bound; see reference_error.
double distance(BoundedNumber expected, float actual) {
  if (std::isfinite(expected.value) && std::isfinite(actual)) {
    const double off = std::fabs(static_cast<double>(actual) - expected.value);
    return off == 0.0 ? 0.0 : off / expected.error;
  }
  const bool same = (std::isnan(expected.value) && std::isnan(actual)) ||
                    expected.value == static_cast<double>(actual);
  return same ? 0.0 : std::numeric_limits<double>::quiet_NaN();
}

/// The magnitude of a code of `magnitude_bits` bits under a shared exponent. A code is a float cut
/// after three fraction bits: the largest one has the shared exponent and all three set, each
/// smaller code is the next smaller such float, and 0 is zero.
float dequantize(unsigned code, unsigned exponent, int magnitude_bits) {
  if (code == 0) return 0.0F;
  const int largest = (1 << magnitude_bits) - 1;
  const int place = 8 * static_cast<int>(exponent) + 7 - (largest - static_cast<int>(code));
  if (place / 8 == 255) return std::numeric_limits<float>::quiet_NaN();
  if (place < 8) return 0.0F;  // only a fresh block of zeros has an exponent that small
  return static_cast<float>(std::ldexp(8 + place % 8, place / 8 - 127 - 3));
}

template <class T>
T at(const void* array, Elems index) {
  return static_cast<const T*>(array)[index];
}

float read_weight(const Weights& weights, Elems index) {
  if (weights.format != Weights::Format::split) return at<float>(weights.main, index);
  return join_master(
      {at<Bf16>(weights.main, index), at<std::uint16_t>(weights.remainder_or_copy, index)});
}

float read_gradient(const Gradient& gradient, Elems index) {
  if (gradient.type == DType::bf16) return to_float(at<Bf16>(gradient.data, index));
  if (gradient.type == DType::f16) return to_float(at<F16>(gradient.data, index));
  return at<float>(gradient.data, index);
}

void read_first(const Moments& moments, Elems index, Element& element) {
  if (moments.format == Moments::Format::bf16_first) {
    element.first = to_float(at<Bf16>(moments.first, index));
  } else if (moments.format == Moments::Format::f32) {
    element.first = at<float>(moments.first, index);
  } else {
    const unsigned byte = at<std::uint8_t>(moments.first, index);
    const unsigned exponent = moments.first_exponents[index / Codes::kBlock];
    const float magnitude = dequantize(byte & 0x7fU, exponent, 7);
    element.first = (byte & 0x80U) != 0 ? -magnitude : magnitude;
    element.first_smallest = dequantize(1, exponent, 7);
  }
}

void read_second(const Moments& moments, Elems index, Element& element) {
  if (moments.format != Moments::Format::blockwise8) {
    element.second = at<float>(moments.second, index);
    return;
  }
  const unsigned exponent = moments.second_exponents[index / Codes::kBlock];
  element.second = dequantize(at<std::uint8_t>(moments.second, index), exponent, 8);
  element.second_smallest = dequantize(1, exponent, 8);
}

/// The code nearest to `value` in a block whose largest magnitude rounds up to the exponent.
unsigned encoded(float value, unsigned exponent, int magnitude_bits) {
  const unsigned largest = (1U << magnitude_bits) - 1;
  const unsigned sign = magnitude_bits == 7 && std::signbit(value) ? 0x80U : 0U;
  if (exponent == 255) return largest | sign;
  const float magnitude = std::fabs(value);
  const float smallest = dequantize(1, exponent, magnitude_bits);
  if (magnitude < smallest) {
    const bool to_zero = magnitude == 0.0F || (magnitude_bits == 7 && 2 * magnitude < smallest);
    return (to_zero ? 0U : 1U) | sign;
  }
  const unsigned base = 8 * exponent + 7 - largest;
  const unsigned place = (std::bit_cast<std::uint32_t>(magnitude) + 0x80000U) >> 20U;
  return std::min(place - base, largest) | sign;
}

void write_codes(std::span<const float> values, int magnitude_bits, std::uint8_t* codes,
                 std::uint8_t* exponents) {
  for (Elems start = 0; start < values.size(); start += Codes::kBlock) {
    const auto block = values.subspan(start, std::min(Codes::kBlock, values.size() - start));
    std::uint32_t largest = 0;
    for (const float value : block) {
      largest = std::max(largest, std::bit_cast<std::uint32_t>(std::fabs(value)));
    }
    // The minimum is 48, since no code stands for a denormal (README.md).
    const unsigned exponent = std::clamp((largest + 0xfffffU) >> 23U, 48U, 255U);
    exponents[start / Codes::kBlock] = static_cast<std::uint8_t>(exponent);
    for (Elems i = 0; i < block.size(); ++i) {
      codes[start + i] = static_cast<std::uint8_t>(encoded(block[i], exponent, magnitude_bits));
    }
  }
}

void require_length(std::size_t length, const Shard& shard) {
  expects(length == 0 || length == shard.size, "moments: the number of values");
}

}  // namespace

Element read_element(Optimizer optimizer, const Shard& shard, Elems index) {
  Element element;
  element.weight = read_weight(shard.weights, index);
  element.gradient = read_gradient(shard.gradient, index);
  if (has_first_moment(optimizer)) read_first(shard.moments, index, element);
  if (has_second_moment(optimizer)) read_second(shard.moments, index, element);
  return element;
}

void read_moments(Optimizer optimizer, const Shard& shard, std::span<float> first,
                  std::span<float> second) {
  if (!has_first_moment(optimizer)) first = {};
  if (!has_second_moment(optimizer)) second = {};
  require_length(first.size(), shard);
  require_length(second.size(), shard);
  Element element;
  for (Elems i = 0; i < first.size(); ++i) {
    cpu_adam::read_first(shard.moments, i, element);
    first[i] = element.first;
  }
  for (Elems i = 0; i < second.size(); ++i) {
    cpu_adam::read_second(shard.moments, i, element);
    second[i] = element.second;
  }
}

void write_moments(Optimizer optimizer, const Shard& shard, std::span<const float> first,
                   std::span<const float> second) {
  if (!has_first_moment(optimizer)) first = {};
  if (!has_second_moment(optimizer)) second = {};
  require_length(first.size(), shard);
  require_length(second.size(), shard);
  const Moments& moments = shard.moments;
  if (moments.format == Moments::Format::blockwise8) {
    write_codes(first, 7, static_cast<std::uint8_t*>(moments.first), moments.first_exponents);
    write_codes(second, 8, static_cast<std::uint8_t*>(moments.second), moments.second_exponents);
    return;
  }
  std::ranges::copy(second, static_cast<float*>(moments.second));
  if (moments.format == Moments::Format::f32) {
    std::ranges::copy(first, static_cast<float*>(moments.first));
  } else {
    std::ranges::transform(first, static_cast<Bf16*>(moments.first), to_bf16);
  }
}

double reference_error(const Hyper& hyper, Moments::Format moments, const Element& before,
                       const Element& after) {
  const Scalars<double> scalars = exact_scalars(hyper);
  Expected expected = updated<0>(hyper, scalars, before);
  const BoundedNumber other_weights[] = {updated<1>(hyper, scalars, before).weight,
                                         updated<-1>(hyper, scalars, before).weight};
  if (moments == Moments::Format::bf16_first) {
    expected.first = stored(expected.first, 8, 0x1p-133);
  } else if (moments == Moments::Format::blockwise8) {
    expected.first = stored(expected.first, 4, after.first_smallest);
    expected.second = stored(expected.second, 4, after.second_smallest);
  }
  double worst = distance(expected.weight, after.weight);
  for (const BoundedNumber& other : other_weights) {
    worst = std::fmin(worst, distance(other, after.weight));
  }
  const auto include = [&worst](double error) {
    if (std::isnan(error) || error > worst) worst = error;
  };
  if (has_first_moment(hyper.optimizer)) include(distance(expected.first, after.first));
  if (has_second_moment(hyper.optimizer)) include(distance(expected.second, after.second));
  return worst;
}

}  // namespace ballast::cpu_adam
