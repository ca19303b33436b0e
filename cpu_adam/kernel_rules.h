#pragma once

#include "cpu_adam/variant.h"

/// What each optimizer does to one element, over `Lanes` (kernel.h). Formulas: README.md.
namespace ballast::cpu_adam {
namespace {

/// The constants of one update in every lane.
template <class Lanes>
struct Constants {
  using Float = typename Lanes::Float;

  Float gradient_scale, decay, l2, first_weight, second_decay, second_weight, epsilon, step_size,
      momentum;
  bool first_from_end, nesterov;

  explicit Constants(const Coefficients& from)
      : gradient_scale(Lanes::broadcast(from.gradient_scale)),
        decay(Lanes::broadcast(from.decay)),
        l2(Lanes::broadcast(from.l2)),
        first_weight(Lanes::broadcast(from.first_weight)),
        second_decay(Lanes::broadcast(from.second_decay)),
        second_weight(Lanes::broadcast(from.second_weight)),
        epsilon(Lanes::broadcast(from.epsilon)),
        step_size(Lanes::broadcast(from.step_size)),
        momentum(Lanes::broadcast(from.momentum)),
        first_from_end(from.first_from_end),
        nesterov(from.nesterov) {}
};

/// One element's numbers: `first` and `second` are left alone where a rule does not keep them.
template <class Lanes>
struct State {
  using Float = typename Lanes::Float;
  Float weight, first, second;
};

template <class Lanes>
inline void update_adam_moments(const Constants<Lanes>& k, State<Lanes>& s,
                                typename Lanes::Float gradient) {
  const auto distance = gradient - s.first;
  s.first = Lanes::fma(k.first_weight, distance, k.first_from_end ? gradient : s.first);
  s.second = Lanes::fma(k.second_weight * gradient, gradient, s.second * k.second_decay);
}

struct AdamWRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = true;
  template <class Lanes>
  static void apply(const Constants<Lanes>& k, State<Lanes>& s, typename Lanes::Float gradient) {
    update_adam_moments<Lanes>(k, s, gradient);
    const auto denominator = Lanes::sqrt(s.second) + k.epsilon;
    s.weight = s.weight * k.decay - k.step_size * s.first / denominator;
  }
};

struct AdamRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = true;
  template <class Lanes>
  static void apply(const Constants<Lanes>& k, State<Lanes>& s, typename Lanes::Float gradient) {
    update_adam_moments<Lanes>(k, s, Lanes::fma(k.l2, s.weight, gradient));
    const auto denominator = Lanes::sqrt(s.second) + k.epsilon;
    s.weight = s.weight - k.step_size * s.first / denominator;
  }
};

struct AdagradRule {
  static constexpr bool kFirst = false;
  static constexpr bool kSecond = true;
  template <class Lanes>
  static void apply(const Constants<Lanes>& k, State<Lanes>& s, typename Lanes::Float gradient) {
    const auto g = Lanes::fma(k.l2, s.weight, gradient);
    s.second = Lanes::fma(g, g, s.second);
    const auto denominator = Lanes::sqrt(s.second) + k.epsilon;
    s.weight = s.weight - k.step_size * g / denominator;
  }
};

struct LionRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = false;
  template <class Lanes>
  static void apply(const Constants<Lanes>& k, State<Lanes>& s, typename Lanes::Float gradient) {
    const auto distance = gradient - s.first;
    const auto direction = Lanes::fma(k.first_weight, distance, s.first);
    s.first = Lanes::fma(k.second_weight, distance, s.first);
    s.weight = s.weight * k.decay - k.step_size * sign<Lanes>(direction);
  }

 private:
  /// 1 with the sign of `x`; zero and NaN stay what they are.
  template <class Lanes>
  static typename Lanes::Float sign(typename Lanes::Float x) {
    const auto bits = Lanes::bits_of(x);
    const auto one = (bits & Lanes::pattern(0x80000000U)) | Lanes::pattern(0x3f800000U);
    const auto magnitude = bits & Lanes::pattern(0x7fffffffU);
    return Lanes::number_of(Lanes::where_nan(x, bits, Lanes::where_zero(magnitude, bits, one)));
  }
};

struct SgdRule {
  static constexpr bool kFirst = true;
  static constexpr bool kSecond = false;
  template <class Lanes>
  static void apply(const Constants<Lanes>& k, State<Lanes>& s, typename Lanes::Float gradient) {
    const auto g = Lanes::fma(k.l2, s.weight, gradient);
    s.first = Lanes::fma(k.momentum, s.first, g);
    const auto direction = k.nesterov ? Lanes::fma(k.momentum, s.first, g) : s.first;
    s.weight = s.weight - k.step_size * direction;
  }
};

}  // namespace
}  // namespace ballast::cpu_adam
