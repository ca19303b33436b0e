#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu_adam/kernel_formats.h"

/// Two vectors of 2 * kWidth consecutive elements: one with the even elements and one with the odd
/// ones. A 32-bit lane of a 16-bit array contains one element of each, so shifts and masks separate
/// them and no permutation is needed.
namespace ballast::cpu_adam {
namespace {

template <class Lanes>
struct Pair {
  typename Lanes::Float even, odd;
};

/// The numbers whose patterns have these upper halves and zeros below.
template <class Lanes>
inline Pair<Lanes> numbers_of_halves(typename Lanes::Bits halves) {
  return {Lanes::number_of(halves << 16), Lanes::number_of(halves & Lanes::pattern(0xffff0000U))};
}

template <class Lanes, class Grad>
inline Pair<Lanes> load_gradients(const typename Grad::Stored* from) {
  if constexpr (std::is_same_v<Grad, Bf16Gradient>) {
    return numbers_of_halves<Lanes>(Lanes::load_halves(from));
  } else {
    Pair<Lanes> pair = {Grad::template load<Lanes>(from),
                        Grad::template load<Lanes>(from + Lanes::kWidth)};
    Lanes::separate(pair.even, pair.odd);
    return pair;
  }
}

template <class Lanes, class Weight>
inline Pair<Lanes> load_weights(const typename Weight::Main* main,
                                const typename Weight::RemainderOrCopy* remainder) {
  if constexpr (std::is_same_v<Weight, SplitWeights>) {
    const auto lower = Lanes::load_halves(remainder);
    const auto upper = Lanes::without_carries(Lanes::load_halves(main), lower);
    return {Lanes::number_of(Lanes::merge(lower, upper << 16)),
            Lanes::number_of(Lanes::merge(lower >> 16, upper))};
  } else {
    Pair<Lanes> pair = {Lanes::load(main), Lanes::load(main + Lanes::kWidth)};
    Lanes::separate(pair.even, pair.odd);
    return pair;
  }
}

template <class Lanes, class Weight>
inline void store_weights(typename Weight::Main* main,
                          typename Weight::RemainderOrCopy* remainder_or_copy,
                          Pair<Lanes> masters) {
  if constexpr (std::is_same_v<Weight, SplitWeights>) {
    const auto even = Lanes::bits_of(masters.even);
    const auto odd = Lanes::bits_of(masters.odd);
    const auto lower = Lanes::merge(even, odd << 16);
    const auto upper = Lanes::merge(even >> 16, odd);
    Lanes::store_halves(remainder_or_copy, lower);
    Lanes::store_halves(main, Lanes::with_carries(upper, lower));
  } else {
    Lanes::join(masters.even, masters.odd);
    constexpr std::size_t kNext = Weight::kStoresRemainderOrCopy ? Lanes::kWidth : 0;
    Weight::template store<Lanes>(main, remainder_or_copy, masters.even);
    Weight::template store<Lanes>(main + Lanes::kWidth, remainder_or_copy + kNext, masters.odd);
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
