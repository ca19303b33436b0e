#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ballast/model/kernels.h"

namespace ballast::model {

// Elementwise formulas of the models, shared by all devices. `T` is a number or a vector of numbers
// that converts from double. Other types bring their exp, erf and sqrt, which argument-dependent
// lookup finds. The functions are constexpr, because nvcc lets a GPU run such functions.

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
using std::fabs;
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

/// max(x, 0); NaN stays NaN.
template <class T>
constexpr T relu(const T& x) {
  return T(0.5) * (x + fabs(x));
}

/// The activation `f` at x, and its derivative there. The only list of formulas by activation.
template <Activation f, class T>
constexpr T activation(const T& x) {
  if constexpr (f == Activation::gelu_tanh) {
    return gelu(x);
  } else if constexpr (f == Activation::gelu) {
    return exact_gelu(x);
  } else if constexpr (f == Activation::silu) {
    return silu(x);
  } else {
    static_assert(f == Activation::relu_squared);
    return relu(x) * relu(x);
  }
}
template <Activation f, class T>
constexpr T activation_derivative(const T& x) {
  if constexpr (f == Activation::gelu_tanh) {
    return gelu_derivative(x);
  } else if constexpr (f == Activation::gelu) {
    return exact_gelu_derivative(x);
  } else if constexpr (f == Activation::silu) {
    return silu_derivative(x, sigmoid(x));
  } else {
    static_assert(f == Activation::relu_squared);
    return T(2.0) * relu(x);
  }
}

/// Calls work(constant) with std::integral_constant of the activation.
template <Activation first = Activation(0), class Work>
constexpr auto with_activation(Activation f, const Work& work) {
  if constexpr (first != Activation::last) {
    if (f != first) return with_activation<Activation(static_cast<int>(first) + 1)>(f, work);
  }
  return work(std::integral_constant<Activation, first>());
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

namespace ballast::model {

/// Softmax state of a row of logits, or of a vocabulary tile of it: cross-entropy = log(total) +
/// largest - wanted. The default is the state of no logits. Its largest logit is finite, because
/// the difference of two infinities would be NaN.
template <class A>
struct RowSum {
  A largest = std::numeric_limits<A>::lowest();
  A wanted = std::numeric_limits<A>::quiet_NaN();  ///< logit of the target
  double total = 0.0;                              ///< sum of exp(logit - largest)
};

static_assert(sizeof(RowSum<float>) == kRowSumBytes);

/// Returns the state of two parts of a row together. The total of the part with the smaller largest
/// logit is rescaled (Milakov & Gimelshein 2018, arXiv 1805.02867). A total of NaN stays NaN.
/// Products are fused explicitly, so that all kernels of a device compute the same bits.
template <class A>
constexpr RowSum<A> merged(const RowSum<A>& a, const RowSum<A>& b) {
  const double distance = static_cast<double>(a.largest) - static_cast<double>(b.largest);
  const A wanted = b.wanted == b.wanted ? b.wanted : a.wanted;  // NaN: in neither
  if (b.largest > a.largest) {
    return {b.largest, wanted, std::fma(a.total, formulas::exp(distance), b.total)};
  }
  return {a.largest, wanted, std::fma(b.total, formulas::exp(-distance), a.total)};
}

/// Row sums of all vocabulary tiles, ordered by place (tensor parallelism), tile and row.
struct RowSumsOfTiles {
  const RowSum<float>* sums = nullptr;
  std::size_t places = 0;
  std::size_t tiles = 0;  ///< per place
  std::size_t rows = 0;
  std::size_t step = 0;  ///< RowSums between the first ones of two places

  /// Returns the state of a row: that of all tiles, merged in ascending order.
  [[nodiscard]] constexpr RowSum<float> merged_row(std::size_t row) const {
    RowSum<float> all = sums[row];
    for (std::size_t i = 1; i < places * tiles; ++i) {
      all = merged(all, sums[i / tiles * step + i % tiles * rows + row]);
    }
    return all;
  }
};

/// Logits of some rows for a vocabulary tile. Their gradients, in the training type, overwrite
/// them, starting at the start of each row.
struct LogitTile {
  float* logits = nullptr;
  std::size_t rows = 0;
  std::size_t stride = 0;  ///< floats between rows, a multiple of 4
  std::size_t first = 0;   ///< token of the first column
  std::size_t width = 0;   ///< number of tokens
  float cap = 0.0F;        ///< soft cap of the logits, see OuterSpec; 0: none
  float factor = 1.0F;     ///< multiplies the logits before the cap
};

/// The rows of a micro-batch of preference pairs.
struct PairRows {
  const double* losses = nullptr;         ///< [N] cross-entropy of each row
  const std::int32_t* targets = nullptr;  ///< [N]
  std::size_t length = 0;                 ///< tokens per sequence
  std::size_t pairs = 0;
  const double* reference = nullptr;  ///< [2 pairs], loss sums of the reference model by sequence
  float* weights = nullptr;           ///< [N], output: derivatives of the pairs' losses
};

/// Cross-entropy of a completion, summed over its tokens, in nats.
struct CompletionLosses {
  double trained = 0.0;
  double reference = 0.0;
};

struct WeighedPair {
  PairResult result;
  /// Derivative of the loss with respect to the cross-entropy of the chosen completion. The
  /// rejected completion has the negative.
  float weight = 0.0F;
};

namespace formulas {

/// -log sigmoid(x), finite even if sigmoid(x) underflows to 0.
constexpr double negative_log_sigmoid(double x) {
  return log1p(exp(x < 0.0 ? x : -x)) - (x < 0.0 ? x : 0.0);
}

}  // namespace formulas

/// The loss of a pair: with z = beta ((log pi(c) - log ref(c)) - (log pi(r) - log ref(r))) and the
/// label smoothing e, (1 - e) (-log sigmoid(z)) + e (-log sigmoid(-z)). Its derivative with respect
/// to z is sigmoid(z) - (1 - e). Source: Rafailov et al., 2023, arXiv 2305.18290, equations 3 and 7
/// and the conservative form of Mitchell, "A note on DPO with noisy preferences", 2023.
constexpr WeighedPair weigh_pair(const Preference& how, const CompletionLosses& chosen,
                                 const CompletionLosses& rejected) {
  const double first = how.beta * (chosen.reference - chosen.trained);
  const double second = how.beta * (rejected.reference - rejected.trained);
  const double z = first - second;
  const double e = how.label_smoothing;
  const double loss =
      (1.0 - e) * formulas::negative_log_sigmoid(z) + e * formulas::negative_log_sigmoid(-z);
  return {{loss, first, second, first > second ? 1.0 : 0.0},
          static_cast<float>(how.beta * (1.0 - e - formulas::sigmoid(z)))};
}

}  // namespace ballast::model
