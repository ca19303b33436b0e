#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu_adam/kernel_codes.h"
#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/kernel_moments.h"
#include "cpu_adam/kernel_rules.h"
#include "cpu_adam/variant.h"

/// AdamW with 8-bit moments, block by block in two passes. The first expands and updates the
/// moments and finds their largest magnitudes, from which the shared exponents follow. The second
/// updates the weights and compresses both moments. kernel_moments.h updates all other blocks.

namespace ballast::cpu_adam {

namespace {

/// The updated moments of a block and the denominators of its steps, in pairs of vectors.
struct UpdatedMoments {
  alignas(kCacheLine) float first[kTile];
  alignas(kCacheLine) float second[kTile];
  alignas(kCacheLine) float denominators[kTile];
};

/// kWidth elements whose moments were expanded, for the first part of the rule.
template <class Lanes>
struct ExpandedGroup {
  using Float = typename Lanes::Float;

  Float scaled_gradient;
  Float old_first;
  Float old_second;
  UpdatedMoments* updated;
  std::size_t i;

  Float gradient() const { return scaled_gradient; }
  Float first() const { return old_first; }
  Float second() const { return old_second; }
  void set_first(Float value) const { Lanes::store(updated->first + i, value); }
  void set_second(Float value) const { Lanes::store(updated->second + i, value); }
};

/// The first pass over block `s`. Stores the shared exponents.
template <class Lanes, class Grad>
inline void update_moments(const Constants<Lanes>& k, const Prefetch& ahead, const Streams& s,
                           UpdatedMoments& updated) {
  const auto* const gradients = static_cast<const typename Grad::Stored*>(s.gradient);
  const auto* const first_codes = static_cast<const std::uint8_t*>(s.first);
  const auto* const second_codes = static_cast<const std::uint8_t*>(s.second);
  const auto first_base = base_of_halves<Lanes, SignedCodes>(*s.first_exponents);
  const auto second_base = base_of_halves<Lanes, UnsignedCodes>(*s.second_exponents);
  LargestMagnitude<Lanes> largest_first;
  LargestMagnitude<Lanes> largest_second;
  const auto update = [&](std::size_t i, auto gradient, auto first, auto second) {
    const ExpandedGroup<Lanes> at{gradient * k.gradient_scale, first, second, &updated, i};
    const auto moments = Rule<Optimizer::adamw>::moments<Lanes>(k, at);
    largest_first.add(moments.first);
    largest_second.add_positive(moments.second);
    Lanes::store(updated.denominators + i, denominator_of<Lanes>(k, moments.second));
  };
  for (std::size_t i = 0; i < kTile; i += 2 * Lanes::kWidth) {
    if (i % kBlock == 0) {
      ahead.of(gradients + i);
      ahead.of(first_codes + i);
      ahead.of(second_codes + i);
    }
    const auto gradient = load_gradients<Lanes, Grad>(gradients + i);
    const auto first = expand_codes<Lanes, SignedCodes>(first_codes + i, first_base);
    const auto second = expand_codes<Lanes, UnsignedCodes>(second_codes + i, second_base);
    update(i, gradient.even, first.even, second.even);
    update(i + Lanes::kWidth, gradient.odd, first.odd, second.odd);
  }
  *s.first_exponents = static_cast<std::uint8_t>(largest_first.shared_exponent());
  *s.second_exponents = static_cast<std::uint8_t>(largest_second.shared_exponent());
}

/// Updates the kBlock weights of block `s` from index `start` on.
template <class Lanes, class Weight>
[[gnu::always_inline]] inline void update_weights(const Constants<Lanes>& k, const Prefetch& ahead,
                                                  const Streams& s, const UpdatedMoments& updated,
                                                  std::size_t start) {
  auto* const main = static_cast<typename Weight::Main*>(s.main);
  auto* const remainder_or_copy =
      static_cast<typename Weight::RemainderOrCopy*>(s.remainder_or_copy);
  const auto step = [&](std::size_t i) {
    return Rule<Optimizer::adamw>::step<Lanes>(k, Lanes::load(updated.first + i),
                                               Lanes::load(updated.denominators + i));
  };
  ahead.of(main + start);
  if constexpr (Weight::kStoresRemainderOrCopy) ahead.of(remainder_or_copy + start);
  for (std::size_t i = start; i < start + kBlock; i += 2 * Lanes::kWidth) {
    auto* const other = Weight::kStoresRemainderOrCopy ? remainder_or_copy + i : nullptr;
    const auto old = load_weights<Lanes, Weight>(main + i, other);
    const auto even = Rule<Optimizer::adamw>::weight<Lanes>(k, old.even, step(i));
    const auto odd = Rule<Optimizer::adamw>::weight<Lanes>(k, old.odd, step(i + Lanes::kWidth));
    store_weights<Lanes, Weight>(main + i, other, {even, odd});
  }
}

/// AdamW on whole blocks whose elements all have the same weight decay; the rest as `fused` does.
template <class Lanes, class Weight, class Grad>
void run_adamw_blockwise8(FusedKernel fused, const Coefficients& k, const Streams& s) noexcept {
  const bool alike = s.undecayed == 0 && !k.first_from_end;
  const std::size_t whole = alike ? s.size / kTile * kTile : 0;
  const Constants<Lanes> constants(k);
  const DrawConstants<Lanes> rounding(k.draw_key);
  rounding.keep_in_memory();
  const Prefetch ahead(sizeof(typename Weight::Main) == sizeof(float));
  for (std::size_t start = 0; start < whole; start += kTile) {
    const Streams block = block_of(s, start, kTile);
    UpdatedMoments updated;
    update_moments<Lanes, Grad>(constants, ahead, block, updated);
    BlockCompressor<Lanes>(rounding, block, updated.first, updated.second)
        .run([&](std::size_t row) {
          update_weights<Lanes, Weight>(constants, ahead, block, updated, row);
        });
  }
  if (whole < s.size) {
    run_blockwise8<Lanes>(fused, k, block_of(s, whole, s.size - whole));
  }
}

}  // namespace

}  // namespace ballast::cpu_adam

/// AdamW with bf16 first moments in one pass. 16-bit arrays are loaded and stored in whole vectors.
/// Unpacking one gives two vectors, and fp32 arrays are permuted to the same order of elements.
/// kernel_moments.h updates elements that do not fill a block.

namespace ballast::cpu_adam {

namespace {

/// 2 * kWidth consecutive elements in the order of unpacked halves.
template <class Lanes>
struct Unpacked {
  using Float = typename Lanes::Float;
  using Bits = typename Lanes::Bits;

  Float vectors[2];

  static Unpacked of_halves(Bits low, Bits high) {
    Bits first;
    Bits last;
    Lanes::unpack_halves(low, high, first, last);
    return {{Lanes::number_of(first), Lanes::number_of(last)}};
  }
  static Unpacked of_uppers(const std::uint16_t* from) {
    return of_halves(Lanes::pattern(0U), Lanes::load_halves(from));
  }
  /// `first` and `last` hold consecutive elements.
  static Unpacked of_floats(Float first, Float last) {
    Lanes::order_as_halves(first, last);
    return {{first, last}};
  }
  static Unpacked of_floats(const float* from) {
    return of_floats(Lanes::load(from), Lanes::load(from + Lanes::kWidth));
  }
};

/// The random bits of a block in the order of unpacked halves.
template <class Lanes>
class UnpackedDraws {
  using Bits = typename Lanes::Bits;

 public:
  explicit UnpackedDraws(const std::uint32_t (&draw_key)[2])
      : rounding_(draw_key),
        counters_(Unpacked<Lanes>::of_floats(
            Lanes::number_of(rounding_.counters),
            Lanes::number_of(rounding_.counters + Lanes::pattern(Lanes::kWidth)))) {
    asm("" : : "r"(this) : "memory");  // as DrawConstants::keep_in_memory()
  }
  /// Draws for the elements from `first` on.
  template <std::size_t kCount>
  void draw(std::uint32_t first, Bits (&x)[kCount]) const {
    for (std::size_t n = 0; n < kCount; ++n) {
      const auto pair = static_cast<std::uint32_t>(n / 2 * 2 * Lanes::kWidth);
      x[n] = Lanes::bits_of(counters_.vectors[n % 2]) + Lanes::pattern(first + pair);
    }
    hash_counters(rounding_, x);
  }

 private:
  DrawConstants<Lanes> rounding_;
  Unpacked<Lanes> counters_;
};

/// The arrays of an update and its parts, each for the kBlock elements from index `i` on. The parts
/// are computed one after the other for all vectors: square roots, random bits, divisions and
/// stores then overlap, because a CPU looks only some instructions ahead.
template <class Lanes, class Weight, class Grad>
struct Bf16FirstArrays {
  using Float = typename Lanes::Float;
  using Bits = typename Lanes::Bits;
  static constexpr std::size_t kVectors = kBlock / Lanes::kWidth;
  using Floats = Float[kVectors];

  typename Weight::Main* main;
  typename Weight::RemainderOrCopy* remainder_or_copy;
  std::uint16_t* first;
  float* second;
  const typename Grad::Stored* gradient;

  explicit Bf16FirstArrays(const Streams& s)
      : main(static_cast<typename Weight::Main*>(s.main)),
        remainder_or_copy(static_cast<typename Weight::RemainderOrCopy*>(s.remainder_or_copy)),
        first(static_cast<std::uint16_t*>(s.first)),
        second(static_cast<float*>(s.second)),
        gradient(static_cast<const typename Grad::Stored*>(s.gradient)) {}

  /// Inlined, because gcc drops a call of a function that does nothing but prefetch.
  [[gnu::always_inline]] void prefetch(const Prefetch& ahead, std::size_t i) const {
    ahead.of(main + i);
    if constexpr (Weight::kStoresRemainderOrCopy) ahead.of(remainder_or_copy + i);
    ahead.of(first + i);
    ahead.of(second + i);
    ahead.of(gradient + i);
  }

  /// Updates both moments and stores the second ones.
  void update_moments(const Constants<Lanes>& k, std::size_t i, Floats& firsts,
                      Floats& denominators) const {
    for (std::size_t n = 0; n < kVectors; n += 2, i += 2 * Lanes::kWidth) {
      const auto gradients = load_gradients(i);
      const auto old_first = Unpacked<Lanes>::of_uppers(first + i);
      const auto old_second = Unpacked<Lanes>::of_floats(second + i);
      Float seconds[2];
      for (std::size_t v = 0; v < 2; ++v) {
        const Vector at{gradients.vectors[v] * k.gradient_scale, old_first.vectors[v],
                        old_second.vectors[v]};
        const auto moments = Rule<Optimizer::adamw>::moments<Lanes>(k, at);
        firsts[n + v] = moments.first;
        seconds[v] = moments.second;
        denominators[n + v] = denominator_of<Lanes>(k, moments.second);
      }
      Lanes::order_as_floats(seconds[0], seconds[1]);
      Lanes::store(second + i, seconds[0]);
      Lanes::store(second + i + Lanes::kWidth, seconds[1]);
    }
  }

  void store_firsts(std::size_t i, const Floats& firsts, const Bits (&draws)[kVectors]) const {
    Bits rounded[kVectors];
    for (std::size_t n = 0; n < kVectors; ++n) rounded[n] = round(firsts[n], draws[n]);
    for (std::size_t n = 0; n < kVectors; n += 2) {
      Lanes::store_halves(first + i + n * Lanes::kWidth,
                          Lanes::pack_uppers(rounded[n], rounded[n + 1]));
    }
  }

  void update_weights(const Constants<Lanes>& k, std::size_t i, const Floats& steps) const {
    for (std::size_t n = 0; n < kVectors; n += 2, i += 2 * Lanes::kWidth) {
      auto* const other = Weight::kStoresRemainderOrCopy ? remainder_or_copy + i : nullptr;
      auto masters = load_weights(main + i, other);
      for (std::size_t v = 0; v < 2; ++v) {
        masters.vectors[v] =
            Rule<Optimizer::adamw>::weight<Lanes>(k, masters.vectors[v], steps[n + v]);
      }
      store_weights(main + i, other, masters);
    }
  }

 private:
  static constexpr bool kSplit = std::is_same_v<Weight, SplitWeights>;
  static constexpr bool kBf16Gradient = std::is_same_v<Grad, Bf16Gradient>;

  /// A vector of the first part of the rule.
  struct Vector {
    Float scaled_gradient;
    Float old_first;
    Float old_second;

    Float gradient() const { return scaled_gradient; }
    Float first() const { return old_first; }
    Float second() const { return old_second; }
    void set_first(Float) const {}
    void set_second(Float) const {}
  };

  Unpacked<Lanes> load_gradients(std::size_t i) const {
    if constexpr (kBf16Gradient) {
      return Unpacked<Lanes>::of_uppers(gradient + i);
    } else {
      return Unpacked<Lanes>::of_floats(Grad::template load<Lanes>(gradient + i),
                                        Grad::template load<Lanes>(gradient + i + Lanes::kWidth));
    }
  }

  /// NaNs of bf16 operands end in zeros, so random bits do not carry into their upper halves.
  static Bits round(Float value, Bits draws) {
    if constexpr (kBf16Gradient) {
      return Lanes::bits_of(value) + (draws & Lanes::pattern(0xffffU));
    } else {
      return round_to_bf16<Lanes>(value, draws);
    }
  }

  static Unpacked<Lanes> load_weights(const typename Weight::Main* main,
                                      const typename Weight::RemainderOrCopy* remainder) {
    if constexpr (kSplit) {
      const auto lower = Lanes::load_halves(remainder);
      const auto upper = Lanes::without_carries(Lanes::load_halves(main), lower);
      return Unpacked<Lanes>::of_halves(lower, upper);
    } else {
      return Unpacked<Lanes>::of_floats(main);
    }
  }

  static void store_weights(typename Weight::Main* main,
                            typename Weight::RemainderOrCopy* remainder_or_copy,
                            Unpacked<Lanes> masters) {
    auto& [first, last] = masters.vectors;
    if constexpr (kSplit) {
      Bits lower;
      Bits upper;
      Lanes::pack_halves(Lanes::bits_of(first), Lanes::bits_of(last), lower, upper);
      Lanes::store_halves(remainder_or_copy, lower);
      Lanes::store_halves(main, Lanes::with_carries(upper, lower));
    } else {
      Lanes::order_as_floats(first, last);
      constexpr std::size_t kNext = Weight::kStoresRemainderOrCopy ? Lanes::kWidth : 0;
      Weight::template store<Lanes>(main, remainder_or_copy, first);
      Weight::template store<Lanes>(main + Lanes::kWidth, remainder_or_copy + kNext, last);
    }
  }
};

/// Whether new first moments are computed from constants that are no NaNs, which could have any
/// bits.
inline bool numbers_scale_gradients(const Coefficients& k) {
  return !__builtin_isnan(k.gradient_scale) && !__builtin_isnan(k.first_weight);
}

template <class Lanes, class Weight, class Grad>
void run_adamw_bf16_first(FusedKernel fused, const Coefficients& coefficients,
                          const Streams& s) noexcept {
  using Updated = Bf16FirstArrays<Lanes, Weight, Grad>;
  const bool fast = !coefficients.first_from_end && numbers_scale_gradients(coefficients);
  const std::size_t whole = fast ? s.size / kBlock * kBlock : 0;
  const Prefetch ahead(sizeof(typename Weight::Main) == sizeof(float));
  const Constants<Lanes> k(coefficients);
  const UnpackedDraws<Lanes> rounding(coefficients.draw_key);
  const Updated arrays(s);
  for (std::size_t i = 0; i < whole; i += kBlock) {
    arrays.prefetch(ahead, i);
    typename Updated::Floats firsts;
    typename Updated::Floats steps;
    arrays.update_moments(k, i, firsts, steps);
    typename Lanes::Bits draws[Updated::kVectors];
    rounding.draw(s.element + static_cast<std::uint32_t>(i), draws);
    for (std::size_t n = 0; n < Updated::kVectors; ++n) {
      steps[n] = Rule<Optimizer::adamw>::step<Lanes>(k, firsts[n], steps[n]);
    }
    arrays.store_firsts(i, firsts, draws);
    arrays.update_weights(k, i, steps);
  }
  if (whole < s.size) {
    Streams rest = tile_of(s, whole, s.size - whole);
    rest.first = forward(s.first, whole * sizeof(std::uint16_t));
    rest.second = forward(s.second, whole * sizeof(float));
    run_bf16_first<Lanes>(fused, coefficients, rest);
  }
}

}  // namespace

}  // namespace ballast::cpu_adam
