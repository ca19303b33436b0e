#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/updater.h"

namespace ballast::cpu_adam::test {

/// One optimizer over one layout of the states.
struct Layout {
  Optimizer optimizer = Optimizer::adamw;
  Weights::Format weights = Weights::Format::split;
  DType gradient = DType::bf16;
  Moments::Format moments = Moments::Format::f32;
};

inline constexpr auto kOptimizers = [] {
  std::array<Optimizer, cpu_adam::kOptimizers.size()> types = {};
  std::ranges::transform(cpu_adam::kOptimizers, types.begin(), &OptimizerRow::type);
  return types;
}();
inline constexpr std::array kWeights = {Weights::Format::split, Weights::Format::plain,
                                        Weights::Format::copy_bf16, Weights::Format::copy_f16};
inline constexpr std::array kGradients = {DType::bf16, DType::f16, DType::f32};
inline constexpr std::array kMoments = {Moments::Format::f32, Moments::Format::bf16_first,
                                        Moments::Format::blockwise8};

/// The full cross product.
inline std::vector<Layout> all_layouts() {
  std::vector<Layout> all;
  for (const auto optimizer : kOptimizers) {
    for (const auto weights : kWeights) {
      for (const auto gradient : kGradients) {
        for (const auto moments : kMoments) all.push_back({optimizer, weights, gradient, moments});
      }
    }
  }
  return all;
}

/// Every optimizer with every format of moments; formats of weights and gradients alternate.
inline std::vector<Layout> some_layouts() {
  std::vector<Layout> some;
  for (const auto optimizer : kOptimizers) {
    for (const auto moments : kMoments) {
      const std::size_t turn = some.size();
      some.push_back({optimizer, kWeights.at(turn % 4), kGradients.at(turn % 3), moments});
    }
  }
  return some;
}

inline std::string describe(const Layout& layout) {
  constexpr std::array weights = {"split", "plain", "copy_bf16", "copy_f16"};
  constexpr std::array moments = {"f32", "bf16_first", "blockwise8"};
  return std::string(to_string(layout.optimizer)) + ", weights " +
         weights.at(static_cast<std::size_t>(layout.weights)) + ", gradient " +
         std::string(ballast::to_string(layout.gradient)) + ", moments " +
         moments.at(static_cast<std::size_t>(layout.moments));
}

inline bool is_nan(float value) {
  return std::isnan(value);
}
inline bool is_nan(Bf16 value) {
  return (value.bits & 0x7fffU) > 0x7f80U;
}
inline bool is_nan(F16 value) {
  return (value.bits & 0x7fffU) > 0x7c00U;
}
template <class T>
requires std::is_integral_v<T>
bool is_nan(T) {
  return false;
}

/// Numbers of many magnitudes.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15U) {}
  /// Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
  std::uint64_t bits() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  }
  /// A number of either sign with a magnitude in [2^lowest, 2^(highest + 1)).
  float any(int lowest, int highest) {
    const std::uint64_t random = bits();
    const auto span = static_cast<std::uint64_t>(highest - lowest + 1);
    const auto exponent =
        static_cast<std::uint32_t>(127 + lowest + static_cast<int>((random >> 32) % span));
    const auto fraction = static_cast<std::uint32_t>(random) & 0x807fffffU;
    return std::bit_cast<float>(fraction | (exponent << 23));
  }

 private:
  std::uint64_t state_;
};

/// `size` elements of `width` bytes, starting `offset` elements after the start of a cache line,
/// between guard bytes that must not change.
class Array {
 public:
  Array() = default;
  Array(std::size_t size, std::size_t width, std::size_t offset)
      : begin_(sizeof(Line) + offset * width),
        bytes_(size * width),
        lines_((begin_ + bytes_) / sizeof(Line) + 2) {
    std::memset(base(), kGuard, lines_.size() * sizeof(Line));
    if (bytes_ != 0) std::memset(base() + begin_, 0, bytes_);
  }

  /// Null when default-constructed.
  template <class T>
  T* as() {
    return lines_.empty() ? nullptr : reinterpret_cast<T*>(base() + begin_);
  }
  template <class T>
  const T* as() const {
    return const_cast<Array*>(this)->as<T>();
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  [[nodiscard]] bool guards_intact() const {
    const auto* const from = reinterpret_cast<const unsigned char*>(lines_.data());
    const auto intact = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(from, from + begin_, intact) &&
           std::all_of(from + begin_ + bytes_, from + lines_.size() * sizeof(Line), intact);
  }
  friend bool operator==(const Array& a, const Array& b) {
    return a.bytes_ == b.bytes_ &&
           (a.bytes_ == 0 || std::memcmp(a.as<char>(), b.as<char>(), a.bytes_) == 0);
  }

 private:
  struct alignas(kCacheLine) Line {
    std::array<unsigned char, kCacheLine> bytes;
  };
  static constexpr unsigned char kGuard = 0xa5;
  unsigned char* base() { return reinterpret_cast<unsigned char*>(lines_.data()); }

  std::size_t begin_ = 0;
  std::size_t bytes_ = 0;
  std::vector<Line> lines_;
};

/// Owns the arrays of one shard; those that the layout does not need are absent.
struct States {
  Layout layout;
  std::size_t size = 0;
  Elems first_element = 0;
  Array main, remainder_or_copy, first, second, first_exponents, second_exponents, gradient;

  /// Zeros.
  States(const Layout& of, std::size_t elements, std::size_t offset = 0)
      : layout(of), size(elements) {
    const bool split = layout.weights == Weights::Format::split;
    const bool blockwise = layout.moments == Moments::Format::blockwise8;
    const bool short_first = layout.moments == Moments::Format::bf16_first;
    main = Array(size, split ? 2 : 4, offset);
    if (layout.weights != Weights::Format::plain) remainder_or_copy = Array(size, 2, offset);
    gradient = Array(size, size_of(layout.gradient), offset);
    const std::size_t blocks = Codes::exponents_of(size);
    if (has_first_moment(layout.optimizer)) {
      first = Array(size, blockwise ? 1 : short_first ? 2 : 4, offset);
      if (blockwise) first_exponents = Array(blocks, 1, offset);
    }
    if (has_second_moment(layout.optimizer)) {
      second = Array(size, blockwise ? 1 : 4, offset);
      if (blockwise) second_exponents = Array(blocks, 1, offset);
    }
  }

  /// Weights, moments and gradients of many magnitudes.
  static States random(const Layout& of, std::size_t elements, std::uint64_t seed,
                       std::size_t offset = 0) {
    States states(of, elements, offset);
    Numbers numbers(seed);
    for (std::size_t i = 0; i < elements; ++i) {
      const float p = numbers.any(-8, 2);
      const float m = numbers.any(-14, 0);
      const float v = std::fabs(numbers.any(-24, 0));
      states.set(i, p, m, v, numbers.any(-12, 2));
    }
    states.set_random_codes(numbers);
    return states;
  }

  /// Sets element `i` from numbers. Moments in codes are not changed.
  void set(std::size_t i, float p, float m, float v, float g) {
    set_weight(i, p);
    set_gradient(i, g);
    if (layout.moments == Moments::Format::blockwise8) return;
    if (second.as<float>() != nullptr) second.as<float>()[i] = v;
    if (first.as<float>() == nullptr) return;
    if (layout.moments == Moments::Format::bf16_first) {
      first.as<Bf16>()[i] = to_bf16(m);
    } else {
      first.as<float>()[i] = m;
    }
  }
  void set_weight(std::size_t i, float p) {
    if (layout.weights == Weights::Format::split) {
      const SplitMaster parts = split_master(p);
      main.as<Bf16>()[i] = parts.weight;
      remainder_or_copy.as<std::uint16_t>()[i] = parts.remainder;
    } else {
      main.as<float>()[i] = p;
    }
  }
  void set_gradient(std::size_t i, float g) {
    if (layout.gradient == DType::bf16) {
      gradient.as<Bf16>()[i] = to_bf16(g);
    } else if (layout.gradient == DType::f16) {
      gradient.as<F16>()[i] = to_f16(g);
    } else {
      gradient.as<float>()[i] = g;
    }
  }
  /// Any code under exponents of moderate numbers.
  void set_random_codes(Numbers& numbers) {
    if (layout.moments != Moments::Format::blockwise8) return;
    for (Array* codes : {&first, &second}) {
      for (std::size_t i = 0; i < codes->bytes(); ++i) {
        codes->as<std::uint8_t>()[i] = static_cast<std::uint8_t>(numbers.bits());
      }
    }
    for (Array* exponents : {&first_exponents, &second_exponents}) {
      for (std::size_t i = 0; i < exponents->bytes(); ++i) {
        exponents->as<std::uint8_t>()[i] = static_cast<std::uint8_t>(115 + numbers.bits() % 16);
      }
    }
  }

  /// Elements [from, from + count); with Codes `from` is a multiple of Codes::kBlock.
  Shard part(std::size_t from, std::size_t count) {
    return {weights(from), moments(from), gradients(from), count, first_element + from};
  }
  Shard shard() { return part(0, size); }

  [[nodiscard]] Element element(std::size_t i) const {
    States& self = const_cast<States&>(*this);  // reading changes nothing, but a Shard is mutable
    return read_element(layout.optimizer, self.shard(), i);
  }

  [[nodiscard]] bool guards_intact() const {
    for (const Array* array : {&main, &remainder_or_copy, &first, &second, &first_exponents,
                               &second_exponents, &gradient}) {
      if (!array->guards_intact()) return false;
    }
    return true;
  }

 private:
  /// Element `from` of an array, null when it is absent.
  template <class T>
  static T* at(Array& array, std::size_t from) {
    return array.as<T>() == nullptr ? nullptr : array.as<T>() + from;
  }
  Weights weights(std::size_t from) {
    switch (layout.weights) {
      case Weights::Format::split:
        return {at<Bf16>(main, from), at<std::uint16_t>(remainder_or_copy, from)};
      case Weights::Format::copy_bf16:
        return {at<float>(main, from), at<Bf16>(remainder_or_copy, from)};
      case Weights::Format::copy_f16:
        return {at<float>(main, from), at<F16>(remainder_or_copy, from)};
      default:
        return Weights(at<float>(main, from));
    }
  }
  Moments moments(std::size_t from) {
    if (layout.moments == Moments::Format::bf16_first) {
      return {at<Bf16>(first, from), at<float>(second, from)};
    }
    if (layout.moments == Moments::Format::f32) {
      return {at<float>(first, from), at<float>(second, from)};
    }
    const std::size_t block = from / Codes::kBlock;
    return {Codes{at<std::uint8_t>(first, from), at<std::uint8_t>(first_exponents, block)},
            Codes{at<std::uint8_t>(second, from), at<std::uint8_t>(second_exponents, block)}};
  }
  Gradient gradients(std::size_t from) {
    if (layout.gradient == DType::bf16) return Gradient(at<const Bf16>(gradient, from));
    if (layout.gradient == DType::f16) return Gradient(at<const F16>(gradient, from));
    return Gradient(at<const float>(gradient, from));
  }
};

/// Index of the first element whose bits differ (two NaNs are equal), or -1.
template <class T>
std::ptrdiff_t first_difference(const Array& a, const Array& b) {
  if (a == b) return -1;
  for (std::size_t i = 0; i < a.bytes() / sizeof(T); ++i) {
    const T x = a.as<T>()[i];
    const T y = b.as<T>()[i];
    if (std::memcmp(&x, &y, sizeof x) == 0 || (is_nan(x) && is_nan(y))) continue;
    return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

/// The difference between states of one layout and size, or "". Two NaNs are equal for every
/// payload, and so are the remainders of two NaN weights.
inline std::string difference(const States& a, const States& b) {
  const auto at = [](const char* what, std::ptrdiff_t i) {
    return std::string(what) + " " + std::to_string(i);
  };
  if (!a.guards_intact() || !b.guards_intact()) return "a guard outside the arrays";
  const bool split = a.layout.weights == Weights::Format::split;
  const bool blockwise = a.layout.moments == Moments::Format::blockwise8;
  std::ptrdiff_t i =
      split ? first_difference<Bf16>(a.main, b.main) : first_difference<float>(a.main, b.main);
  if (i >= 0) return at("weight", i);
  if (split && !(a.remainder_or_copy == b.remainder_or_copy)) {
    for (std::size_t j = 0; j < a.size; ++j) {
      const bool same =
          a.remainder_or_copy.as<std::uint16_t>()[j] == b.remainder_or_copy.as<std::uint16_t>()[j];
      if (!same && !is_nan(a.main.as<Bf16>()[j]))
        return at("remainder", static_cast<std::ptrdiff_t>(j));
    }
  } else if (!split) {
    const bool half = a.layout.weights == Weights::Format::copy_f16;
    i = half ? first_difference<F16>(a.remainder_or_copy, b.remainder_or_copy)
             : first_difference<Bf16>(a.remainder_or_copy, b.remainder_or_copy);
    if (i >= 0) return at("copy", i);
  }
  i = blockwise ? first_difference<std::uint8_t>(a.first, b.first)
      : a.layout.moments == Moments::Format::bf16_first ? first_difference<Bf16>(a.first, b.first)
                                                        : first_difference<float>(a.first, b.first);
  if (i >= 0) return at("first moment", i);
  i = blockwise ? first_difference<std::uint8_t>(a.second, b.second)
                : first_difference<float>(a.second, b.second);
  if (i >= 0) return at("second moment", i);
  i = first_difference<std::uint8_t>(a.first_exponents, b.first_exponents);
  if (i >= 0) return at("exponent of the first moment, block", i);
  i = first_difference<std::uint8_t>(a.second_exponents, b.second_exponents);
  if (i >= 0) return at("exponent of the second moment, block", i);
  return a.gradient == b.gradient ? "" : "the gradient";
}

/// Typical hyper-parameters that use every term.
inline Hyper hyper_at(Optimizer optimizer, std::int64_t step) {
  return {.optimizer = optimizer,
          .learning_rate = 2e-3,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .epsilon = 1e-8,
          .momentum = 0.85,
          .nesterov = step % 2 == 0,
          .weight_decay = 0.1,
          .step = step,
          .gradient_scale = 0.37F};
}

/// Runs `steps` updates, starting with hyper.step.
inline void run(const Updater& updater, States& states, int steps, Hyper hyper) {
  hyper.optimizer = states.layout.optimizer;
  for (int i = 0; i < steps; ++i, ++hyper.step) updater.step(hyper, states.shard());
}
inline void run(const Updater& updater, States& states, int steps) {
  for (int i = 1; i <= steps; ++i) {
    updater.step(hyper_at(states.layout.optimizer, i), states.shard());
  }
}

/// The distance from |x| to the next larger float.
inline double ulp(double x) {
  const auto magnitude = static_cast<float>(std::fabs(x));
  return static_cast<double>(std::nextafter(magnitude, INFINITY)) - static_cast<double>(magnitude);
}

}  // namespace ballast::cpu_adam::test
