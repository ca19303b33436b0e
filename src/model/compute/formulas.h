#pragma once

// Elementwise formulas of the models, shared by all devices. `T` is a number or a vector of numbers
// that converts from double. Other types bring their exp, erf and sqrt, which argument-dependent
// lookup finds. The functions are constexpr, because nvcc lets a GPU run such functions.

#include <cmath>

#include "src/model/spec/activation.h"

namespace ballast::model {

/// The gating function of an MLP: f(gate) * up. With a limit: g sigmoid(slope g) (1 + u), where g =
/// min(gate, limit) and u is up clamped to [-limit, limit]. Clamped values have no gradient.
struct Gating {
  Activation activation = Activation::silu;
  float limit = 0.0F;  ///< 0: none
  float slope = 1.0F;
};

}  // namespace ballast::model

namespace ballast::model::formulas {

using std::erf;
using std::exp;
using std::log1p;
using std::sqrt;
using std::tanh;

/// sqrt(2 / pi).
inline constexpr double kGeluScale = 0.79788456080286535588;
inline constexpr double kGeluCubic = 0.044715;
/// sqrt(1 / 2), and the density of the normal distribution at 0.
inline constexpr double kRootOfHalf = 0.70710678118654752440;
inline constexpr double kNormalDensity = 0.39894228040143267794;

/// Logistic function.
template <class T>
constexpr T sigmoid(const T& x) {
  return T(1.0) / (T(1.0) + exp(-x));
}

/// GELU in its tanh form: x/2 * (1 + tanh(u)) with u = sqrt(2/pi) * (x + 0.044715 x^3), and
/// (1 + tanh(u)) / 2 = sigmoid(2u). Source: Hendrycks & Gimpel, "Gaussian error linear units",
/// 2016.
template <class T>
constexpr T gelu(const T& x) {
  const T u = T(kGeluScale) * x * (T(1.0) + T(kGeluCubic) * x * x);
  return x * sigmoid(T(2.0) * u);
}

/// d gelu(x) / dx.
template <class T>
constexpr T gelu_derivative(const T& x) {
  const T square = x * x;
  const T u = T(kGeluScale) * x * (T(1.0) + T(kGeluCubic) * square);
  const T slope = T(kGeluScale) * (T(1.0) + T(3.0 * kGeluCubic) * square);
  const T s = sigmoid(T(2.0) * u);
  return s + T(2.0) * x * s * (T(1.0) - s) * slope;
}

/// Exact GELU: x * (normal distribution function of x). Source: as above.
template <class T>
constexpr T exact_gelu(const T& x) {
  return x * T(0.5) * (T(1.0) + erf(x * T(kRootOfHalf)));
}

/// d exact_gelu(x) / dx.
template <class T>
constexpr T exact_gelu_derivative(const T& x) {
  const T below = T(0.5) * (T(1.0) + erf(x * T(kRootOfHalf)));
  return below + x * T(kNormalDensity) * exp(T(-0.5) * x * x);
}

/// SiLU: x * sigmoid(x).
template <class T>
constexpr T silu(const T& x) {
  return x * sigmoid(x);
}

/// d silu(x) / dx, given s = sigmoid(x).
template <class T>
constexpr T silu_derivative(const T& x, const T& s) {
  return s * (T(1.0) + x * (T(1.0) - s));
}

/// The coordinates of (a, b) rotated by the angle with this cosine and sine. Rotary positions
/// rotate the pair (x[i], x[i + size/2]). Source: Su et al., "RoFormer", 2021, section 3.2.
template <class T>
constexpr T rotate_first(const T& a, const T& b, const T& cosine, const T& sine) {
  return a * cosine - b * sine;
}
template <class T>
constexpr T rotate_second(const T& a, const T& b, const T& cosine, const T& sine) {
  return b * cosine + a * sine;
}

/// 1 / sqrt(mean square + epsilon), the factor of both norms.
template <class T>
constexpr T inverse_deviation(const T& mean_square, const T& epsilon) {
  return T(1.0) / sqrt(mean_square + epsilon);
}

/// Gradient of a normalised row. `g`: gradient of the normalised value `n`; `mean_g` and `mean_gn`:
/// the row's means of g (0 for RMSNorm) and of g * n.
template <class T>
constexpr T norm_derivative(const T& g, const T& n, const T& mean_g, const T& mean_gn,
                            const T& factor) {
  return factor * (g - mean_g - n * mean_gn);
}

/// exp(scale * score - log_sum): a probability of a softmax, given the logarithm of its sum.
template <class T>
constexpr T probability(const T& score, const T& scale, const T& log_sum) {
  return exp(score * scale - log_sum);
}

/// Gradient of a softmax's score. `p`: probability; `dp`: its gradient; `mean_dp`: sum of p * dp
/// over the row.
template <class T>
constexpr T softmax_derivative(const T& p, const T& dp, const T& mean_dp, const T& scale) {
  return p * (dp - mean_dp) * scale;
}

/// Soft cap: a smooth limit of x to the range (-cap, cap).
template <class T>
constexpr T soft_cap(const T& x, const T& cap) {
  return cap * tanh(x / cap);
}

/// d soft_cap(x) / dx, given y = soft_cap(x).
template <class T>
constexpr T soft_cap_derivative(const T& y, const T& cap) {
  const T u = y / cap;
  return T(1.0) - u * u;
}

}  // namespace ballast::model::formulas
