#pragma once

#include "cpu_adam/variant.h"

/// The formula of each optimizer, once, over `Lanes` (kernel.h): kernels of all instruction sets,
/// GPUs and the reference in double run it.
///
/// Blocks end with padding, which is zero and stays zero: where gradient, weight and moments are 0,
/// a rule must leave weight and moments 0. A test checks this for every optimizer.
namespace ballast::cpu_adam {
namespace {

template <class Lanes>
struct Constants {
  using Float = typename Lanes::Float;

  Float gradient_scale, decay, l2, first_weight, second_decay, second_weight, epsilon, step_size,
      momentum;
  bool nesterov;

  template <class Number>
  explicit constexpr Constants(const Scalars<Number>& from)
      : gradient_scale(Lanes::broadcast(from.gradient_scale)),
        decay(Lanes::broadcast(from.decay)),
        l2(Lanes::broadcast(from.l2)),
        first_weight(Lanes::broadcast(from.first_weight)),
        second_decay(Lanes::broadcast(from.second_decay)),
        second_weight(Lanes::broadcast(from.second_weight)),
        epsilon(Lanes::broadcast(from.epsilon)),
        step_size(Lanes::broadcast(from.step_size)),
        momentum(Lanes::broadcast(from.momentum)),
        nesterov(from.nesterov) {}
};

/// Factors that undo the bias of moments that start at zero.
struct BiasCorrections {
  double first;        ///< 1 - beta1^step
  double second_root;  ///< sqrt(1 - beta2^step)
};

/// Base of the rules.
template <Optimizer optimizer>
struct KeptMoments {
  static constexpr Optimizer kOptimizer = optimizer;
  static constexpr bool kFirst = has_first_moment(optimizer);
  static constexpr bool kSecond = has_second_moment(optimizer);
};

/// The rule of an optimizer. `apply` accesses one group of kWidth elements through `at`: gradient()
/// (scaled), first(), second() and weight() load; set_first(), set_second() and set_weight() store.
/// Late loads and early stores were measured to be fastest. Further members, where a rule has them:
/// - correct(k, corrections): puts bias corrections into the scalars of a step
/// - FromGradient: the rule for Coefficients::first_from_end
/// - kInParts: see update_groups() in kernel.h
template <Optimizer optimizer, bool from_gradient = false>
struct Rule;

/// The new first moment. `from_gradient` is Coefficients::first_from_end at compile time, since a
/// selection in the loop costs 5%.
template <class Lanes, bool from_gradient>
constexpr typename Lanes::Float interpolated(const Constants<Lanes>& k, typename Lanes::Float first,
                                             typename Lanes::Float gradient) {
  return Lanes::fma(k.first_weight, gradient - first, from_gradient ? gradient : first);
}

/// Updates both moments and keeps them.
template <class Lanes, bool from_gradient>
struct AdamMoments {
  using Float = typename Lanes::Float;
  Float first, second;

  template <class Group>
  constexpr AdamMoments(const Constants<Lanes>& k, Group at, Float gradient) : first(at.first()) {
    const Float decayed = at.second() * k.second_decay;
    second = Lanes::fma(k.second_weight * gradient, gradient, decayed);
    first = interpolated<Lanes, from_gradient>(k, first, gradient);
    at.set_first(first);
    at.set_second(second);
  }
};

/// The denominator of Adam's step.
template <class Lanes>
constexpr typename Lanes::Float denominator_of(const Constants<Lanes>& k,
                                               typename Lanes::Float second) {
  return Lanes::sqrt(second) + k.epsilon;
}

/// Kingma & Ba, "Adam", ICLR 2015, algorithm 1, in the form of the end of its section 2: one
/// division per element instead of PyTorch's two, which is faster and rounds less.
constexpr void correct_adam(Scalars<double>& k, const BiasCorrections& by) {
  k.step_size *= by.second_root / by.first;
  k.epsilon *= by.second_root;
}

/// Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2. In parts,
/// so that the square roots, divisions and other instructions of several vectors overlap.
template <bool from_gradient>
struct Rule<Optimizer::adamw, from_gradient> : KeptMoments<Optimizer::adamw> {
  using FromGradient = Rule<Optimizer::adamw, true>;
  static constexpr bool kInParts = true;
  static constexpr void correct(Scalars<double>& k, const BiasCorrections& by) {
    correct_adam(k, by);
  }
  template <class Lanes, class Group>
  static constexpr AdamMoments<Lanes, from_gradient> moments(const Constants<Lanes>& k, Group at) {
    return {k, at, at.gradient()};
  }
  template <class Lanes>
  static constexpr typename Lanes::Float step(const Constants<Lanes>& k,
                                              typename Lanes::Float first,
                                              typename Lanes::Float denominator) {
    return Lanes::divide(k.step_size * first, denominator);
  }
  template <class Lanes>
  static constexpr typename Lanes::Float weight(const Constants<Lanes>& k,
                                                typename Lanes::Float old,
                                                typename Lanes::Float step) {
    return Lanes::fma(old, k.decay, step);
  }
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto updated = moments<Lanes>(k, at);
    const auto change = step<Lanes>(k, updated.first, denominator_of<Lanes>(k, updated.second));
    at.set_weight(weight<Lanes>(k, at.weight(), change));
  }
};

template <bool from_gradient>
struct Rule<Optimizer::adam, from_gradient> : KeptMoments<Optimizer::adam> {
  using FromGradient = Rule<Optimizer::adam, true>;
  static constexpr void correct(Scalars<double>& k, const BiasCorrections& by) {
    correct_adam(k, by);
  }
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto weight = at.weight();
    const AdamMoments<Lanes, from_gradient> moments(k, at, Lanes::fma(k.l2, weight, at.gradient()));
    at.set_weight(weight + Lanes::divide(k.step_size * moments.first,
                                         denominator_of<Lanes>(k, moments.second)));
  }
};

/// Duchi, Hazan & Singer, "Adaptive subgradient methods", JMLR 2011.
template <>
struct Rule<Optimizer::adagrad> : KeptMoments<Optimizer::adagrad> {
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto weight = at.weight();
    const auto gradient = Lanes::fma(k.l2, weight, at.gradient());
    const auto sum = Lanes::fma(gradient, gradient, at.second());
    at.set_second(sum);
    const auto denominator = Lanes::sqrt(sum) + k.epsilon;
    at.set_weight(weight + Lanes::divide(k.step_size * gradient, denominator));
  }
};

/// 1 with the sign of `x`; zero and NaN are returned unchanged.
template <class Lanes>
constexpr typename Lanes::Float sign_of(typename Lanes::Float x) {
  if constexpr (requires { Lanes::sign(x); }) {
    return Lanes::sign(x);
  } else {
    const auto bits = Lanes::bits_of(x);
    const auto one = (bits & Lanes::pattern(0x80000000U)) | Lanes::pattern(0x3f800000U);
    const auto magnitude = bits & Lanes::pattern(0x7fffffffU);
    return Lanes::number_of(Lanes::where_nan(x, bits, Lanes::where_zero(magnitude, bits, one)));
  }
}

/// Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
template <>
struct Rule<Optimizer::lion> : KeptMoments<Optimizer::lion> {
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto first = at.first();
    const auto distance = at.gradient() - first;
    at.set_first(Lanes::fma(k.second_weight, distance, first));
    const auto step = k.step_size * sign_of<Lanes>(Lanes::fma(k.first_weight, distance, first));
    at.set_weight(Lanes::fma(at.weight(), k.decay, step));
  }
};

/// Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
/// 2013, in the form of torch.optim.SGD.
template <>
struct Rule<Optimizer::sgd> : KeptMoments<Optimizer::sgd> {
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto weight = at.weight();
    const auto gradient = Lanes::fma(k.l2, weight, at.gradient());
    const auto first = Lanes::fma(k.momentum, at.first(), gradient);
    at.set_first(first);
    const auto direction = k.nesterov ? Lanes::fma(k.momentum, first, gradient) : first;
    at.set_weight(Lanes::fma(k.step_size, direction, weight));
  }
};

/// `x` without its sign.
template <class Lanes>
constexpr typename Lanes::Float magnitude_of(typename Lanes::Float x) {
  if constexpr (requires { Lanes::magnitude(x); }) {
    return Lanes::magnitude(x);
  } else {
    return Lanes::number_of(Lanes::bits_of(x) & Lanes::pattern(0x7fffffffU));
  }
}

/// The larger one of two numbers; NaN if one is NaN.
template <class Lanes>
constexpr typename Lanes::Float maximum_of(typename Lanes::Float a, typename Lanes::Float b) {
  if constexpr (requires { Lanes::maximum(a, b); }) {
    return Lanes::maximum(a, b);
  } else {
    const auto bits = Lanes::bits_of(b);
    return Lanes::number_of(
        Lanes::where_nan(b, bits, Lanes::where_less(a, b, bits, Lanes::bits_of(a))));
  }
}

/// `x`, or 0 where it equals `least`.
template <class Lanes>
constexpr typename Lanes::Float zero_where_equal(typename Lanes::Float x,
                                                 typename Lanes::Float least) {
  if constexpr (requires { Lanes::zero_where_equal(x, least); }) {
    return Lanes::zero_where_equal(x, least);
  } else {
    const auto bits = Lanes::bits_of(x);
    return Lanes::number_of(Lanes::zero_where_zero(bits ^ Lanes::bits_of(least), bits));
  }
}

/// Kingma & Ba, "Adam", ICLR 2015, algorithm 2, in the form and with the bits of
/// torch.optim.Adamax, except that the second moment is stored as 0 where torch has its least
/// value, eps. The following moments and all weights are the same, since |gradient| + eps is at
/// least eps.
template <bool from_gradient>
struct Rule<Optimizer::adamax, from_gradient> : KeptMoments<Optimizer::adamax> {
  using FromGradient = Rule<Optimizer::adamax, true>;
  static constexpr void correct(Scalars<double>& k, const BiasCorrections& by) {
    k.step_size /= by.first;
  }
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto weight = at.weight();
    const auto gradient = Lanes::fma(k.l2, weight, at.gradient());
    const auto first = interpolated<Lanes, from_gradient>(k, at.first(), gradient);
    const auto largest =
        maximum_of<Lanes>(at.second() * k.second_decay, magnitude_of<Lanes>(gradient) + k.epsilon);
    at.set_first(first);
    at.set_second(zero_where_equal<Lanes>(largest, k.epsilon));
    at.set_weight(weight + Lanes::divide(k.step_size * first, largest));
  }
};

/// Returns `work(rule)` with the rule of `optimizer`. A row of kOptimizers without a rule does not
/// compile.
template <std::size_t row = 0>
constexpr auto with_rule(Optimizer optimizer, const auto& work) {
  if constexpr (row + 1 < kOptimizers.size()) {
    if (optimizer != kOptimizers[row].type) return with_rule<row + 1>(optimizer, work);
  }
  return work(Rule<kOptimizers[row].type>());
}

}  // namespace
}  // namespace ballast::cpu_adam
