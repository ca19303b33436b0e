#pragma once

#include "cpu_adam/variant.h"

/// The update rule of each optimizer, over `Lanes` (kernel.h). Formulas: README.md.
namespace ballast::cpu_adam {
namespace {

template <class Lanes>
struct Constants {
  using Float = typename Lanes::Float;

  Float gradient_scale, decay, l2, first_weight, second_decay, second_weight, epsilon, step_size,
      momentum;
  bool nesterov;

  explicit constexpr Constants(const Coefficients& from)
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

/// Each rule accesses one group of kWidth elements through `at`: gradient() (scaled), first(),
/// second() and weight() load; set_first(), set_second() and set_weight() store. Late loads and
/// early stores were measured to be fastest.

/// Updates both moments and keeps them. `from_gradient` is
/// Coefficients::first_from_end at compile time, since a selection in the loop costs 5%.
template <class Lanes, bool from_gradient>
struct AdamMoments {
  using Float = typename Lanes::Float;
  Float first, second;

  template <class Group>
  constexpr AdamMoments(const Constants<Lanes>& k, Group at, Float gradient) : first(at.first()) {
    const Float decayed = at.second() * k.second_decay;
    second = Lanes::fma(k.second_weight * gradient, gradient, decayed);
    if constexpr (from_gradient) {
      first = Lanes::fma(k.first_weight, gradient - first, gradient);
    } else {
      first = Lanes::fma(k.first_weight, gradient - first, first);
    }
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

/// In parts, so that the square roots, divisions and other instructions of several vectors overlap.
template <bool from_gradient = false>
struct AdamWRule {
  using FromGradient = AdamWRule<true>;
  static constexpr bool kInParts = true;
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = true;
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

template <bool from_gradient = false>
struct AdamRule {
  using FromGradient = AdamRule<true>;
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = true;
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto weight = at.weight();
    const AdamMoments<Lanes, from_gradient> moments(k, at, Lanes::fma(k.l2, weight, at.gradient()));
    at.set_weight(weight + Lanes::divide(k.step_size * moments.first,
                                         denominator_of<Lanes>(k, moments.second)));
  }
};

struct AdagradRule {
  static constexpr bool kFirst = false;
  static constexpr bool kSecond = true;
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

struct LionRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = false;
  template <class Lanes, class Group>
  static constexpr void apply(const Constants<Lanes>& k, Group at) {
    const auto first = at.first();
    const auto distance = at.gradient() - first;
    at.set_first(Lanes::fma(k.second_weight, distance, first));
    const auto step = k.step_size * sign<Lanes>(Lanes::fma(k.first_weight, distance, first));
    at.set_weight(Lanes::fma(at.weight(), k.decay, step));
  }

 private:
  /// 1 with the sign of `x`; zero and NaN are returned unchanged.
  template <class Lanes>
  static constexpr typename Lanes::Float sign(typename Lanes::Float x) {
    const auto bits = Lanes::bits_of(x);
    const auto one = (bits & Lanes::pattern(0x80000000U)) | Lanes::pattern(0x3f800000U);
    const auto magnitude = bits & Lanes::pattern(0x7fffffffU);
    return Lanes::number_of(Lanes::where_nan(x, bits, Lanes::where_zero(magnitude, bits, one)));
  }
};

struct SgdRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = false;
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

}  // namespace
}  // namespace ballast::cpu_adam
