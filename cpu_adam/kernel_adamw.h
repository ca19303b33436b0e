#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/kernel_codes.h"
#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/kernel_moments.h"
#include "cpu_adam/kernel_pairs.h"
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
    const auto moments = AdamWRule<>::moments<Lanes>(k, at);
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
    return AdamWRule<>::step<Lanes>(k, Lanes::load(updated.first + i),
                                    Lanes::load(updated.denominators + i));
  };
  ahead.of(main + start);
  if constexpr (Weight::kStoresRemainderOrCopy) ahead.of(remainder_or_copy + start);
  for (std::size_t i = start; i < start + kBlock; i += 2 * Lanes::kWidth) {
    auto* const other = Weight::kStoresRemainderOrCopy ? remainder_or_copy + i : nullptr;
    const auto old = load_weights<Lanes, Weight>(main + i, other);
    const auto even = AdamWRule<>::weight<Lanes>(k, old.even, step(i));
    const auto odd = AdamWRule<>::weight<Lanes>(k, old.odd, step(i + Lanes::kWidth));
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
