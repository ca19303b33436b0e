#pragma once

#include <cstddef>
#include <cstdint>

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

/// The updated moments of a block.
struct UpdatedMoments {
  alignas(kCacheLine) float first[kTile];
  alignas(kCacheLine) float second[kTile];
};

/// kWidth elements whose moments were expanded, for the first part of the rule.
template <class Lanes, class Grad>
struct ExpandedGroup {
  using Float = typename Lanes::Float;

  const typename Grad::Stored* gradients;
  Float gradient_scale;
  Float old_first;
  Float old_second;
  UpdatedMoments* updated;
  std::size_t i;

  Float gradient() const { return Grad::template load<Lanes>(gradients + i) * gradient_scale; }
  Float first() const { return old_first; }
  Float second() const { return old_second; }
  void set_first(Float value) const { Lanes::store(updated->first + i, value); }
  void set_second(Float value) const { Lanes::store(updated->second + i, value); }
};

/// kWidth weights, for the second part of the rule.
template <class Lanes, class Weight>
struct WeightGroup {
  using Float = typename Lanes::Float;

  typename Weight::Main* main;
  typename Weight::RemainderOrCopy* remainder_or_copy;

  Float weight() const { return Weight::template load<Lanes>(main, remainder_or_copy); }
  void set_weight(Float value) const {
    Weight::template store<Lanes>(main, remainder_or_copy, value);
  }
};

/// The first pass over block `s`. Stores the shared exponents.
template <class Lanes, class Grad>
inline void update_moments(const Constants<Lanes>& k, const Prefetch& ahead, const Streams& s,
                           UpdatedMoments& updated) {
  constexpr std::size_t kGroups = kExpanded / Lanes::kWidth;
  const auto* const gradients = static_cast<const typename Grad::Stored*>(s.gradient);
  const auto* const first_codes = static_cast<const std::uint8_t*>(s.first);
  const auto* const second_codes = static_cast<const std::uint8_t*>(s.second);
  const auto first_base = Lanes::pattern(code_base<SignedCodes>(*s.first_exponents));
  const auto second_base = Lanes::pattern(code_base<UnsignedCodes>(*s.second_exponents));
  LargestMagnitude<Lanes> largest_first;
  LargestMagnitude<Lanes> largest_second;
  for (std::size_t run = 0; run < kTile; run += kExpanded) {
    if (run % kBlock == 0) {
      ahead.of(gradients + run);
      ahead.of(first_codes + run);
      ahead.of(second_codes + run);
    }
    typename Lanes::Float first[kGroups];
    typename Lanes::Float second[kGroups];
    expand_codes<Lanes, SignedCodes>(first_codes + run, first_base, first);
    expand_codes<Lanes, UnsignedCodes>(second_codes + run, second_base, second);
    for (std::size_t n = 0; n < kGroups; ++n) {
      const std::size_t i = run + n * Lanes::kWidth;
      const ExpandedGroup<Lanes, Grad> at{gradients, k.gradient_scale, first[n],
                                          second[n], &updated,         i};
      const auto moments = AdamWRule<>::moments<Lanes>(k, at);
      largest_first.add(moments.first);
      largest_second.add_positive(moments.second);
    }
  }
  *s.first_exponents = static_cast<std::uint8_t>(largest_first.shared_exponent());
  *s.second_exponents = static_cast<std::uint8_t>(largest_second.shared_exponent());
}

/// The second pass.
template <class Lanes, class Weight>
inline void update_weights(const Constants<Lanes>& k, const Prefetch& ahead, const Streams& s,
                           const UpdatedMoments& updated, const DrawConstants<Lanes>& rounding) {
  constexpr std::size_t kGroups = kBlock / Lanes::kWidth;
  auto* const main = static_cast<typename Weight::Main*>(s.main);
  auto* const remainder_or_copy =
      static_cast<typename Weight::RemainderOrCopy*>(s.remainder_or_copy);
  const CodeScale<Lanes, SignedCodes> first_scale(*s.first_exponents);
  const CodeScale<Lanes, UnsignedCodes> second_scale(*s.second_exponents);
  for (std::size_t block = 0; block < kTile; block += kBlock) {
    ahead.of(main + block);
    if constexpr (Weight::kStoresRemainderOrCopy) ahead.of(remainder_or_copy + block);
    const auto weights = [&](std::size_t n) {
      const std::size_t i = block + n * Lanes::kWidth;
      auto* const other = Weight::kStoresRemainderOrCopy ? remainder_or_copy + i : nullptr;
      return WeightGroup<Lanes, Weight>{main + i, other};
    };
    // In this order the latencies of square roots and divisions overlap with other instructions.
    typename Lanes::Float step[kGroups];
    for (std::size_t n = 0; n < kGroups; ++n) {
      step[n] = denominator_of<Lanes>(k, Lanes::load(updated.second + block + n * Lanes::kWidth));
    }
    const Draws<Lanes> draws(rounding, s.element + static_cast<std::uint32_t>(block));
    for (std::size_t n = 0; n < kGroups; ++n) {
      const auto first = Lanes::load(updated.first + block + n * Lanes::kWidth);
      step[n] = AdamWRule<>::step<Lanes>(k, first, step[n]);
    }
    compress_codes(first_scale, updated.first + block, draws,
                   static_cast<std::uint8_t*>(s.first) + block);
    compress_codes(second_scale, updated.second + block, draws,
                   static_cast<std::uint8_t*>(s.second) + block);
    for (std::size_t n = 0; n < kGroups; ++n) {
      step[n] = AdamWRule<>::weight<Lanes>(k, weights(n).weight(), step[n]);
    }
    for (std::size_t n = 0; n < kGroups; ++n) weights(n).set_weight(step[n]);
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
    update_weights<Lanes, Weight>(constants, ahead, block, updated, rounding);
  }
  if (whole < s.size) {
    run_blockwise8<Lanes>(fused, k, block_of(s, whole, s.size - whole));
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
