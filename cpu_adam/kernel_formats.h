#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ballast/core/units.h"

#include "cpu_adam/variant.h"

/// How weights and gradients are stored, over `Lanes` (kernel.h): each format loads kWidth
/// elements as floats and stores them back. The scalar twins are in core/dtype.h.

namespace ballast::cpu_adam {

namespace {

struct Bf16Gradient {
  using Stored = std::uint16_t;
  template <class Lanes>
  static constexpr typename Lanes::Float load(const Stored* from) {
    return Lanes::number_of(Lanes::widen_upper(from));
  }
};

struct F16Gradient {
  using Stored = std::uint16_t;
  template <class Lanes>
  static constexpr typename Lanes::Float load(const Stored* from) {
    return Lanes::load_half(from);
  }
};

struct F32Gradient {
  using Stored = float;
  template <class Lanes>
  static constexpr typename Lanes::Float load(const Stored* from) {
    return Lanes::load(from);
  }
};

/// join_master() and split_master() of core/dtype.h. A NaN that an operation returns is already
/// quiet.
struct SplitWeights {
  using Main = std::uint16_t;
  using RemainderOrCopy = std::uint16_t;
  static constexpr bool kLoadsRemainder = true;
  static constexpr bool kStoresRemainderOrCopy = true;

  template <class Lanes>
  static constexpr typename Lanes::Float load(const Main* weight,
                                              const RemainderOrCopy* remainder) {
    const auto half = Lanes::pattern(0x8000U);
    return Lanes::number_of((Lanes::pair(remainder, weight) ^ half) - half);
  }
  template <class Lanes>
  static constexpr void store(Main* weight, RemainderOrCopy* remainder,
                              typename Lanes::Float master) {
    const auto half = Lanes::zero_where_nan(master, Lanes::pattern(0x8000U));
    Lanes::unpair((Lanes::bits_of(master) + half) ^ half, remainder, weight);
  }
};

struct PlainWeights {
  using Main = float;
  using RemainderOrCopy = float;
  static constexpr bool kLoadsRemainder = false;
  static constexpr bool kStoresRemainderOrCopy = false;

  template <class Lanes>
  static constexpr typename Lanes::Float load(const Main* weight, const void*) {
    return Lanes::load(weight);
  }
  template <class Lanes>
  static constexpr void store(Main* weight, RemainderOrCopy*, typename Lanes::Float master) {
    Lanes::store(weight, master);
  }
};

/// An fp32 master with a bf16 copy, rounded to nearest even as to_bf16 of core/dtype.h does.
struct Bf16Copy : PlainWeights {
  using RemainderOrCopy = std::uint16_t;
  static constexpr bool kStoresRemainderOrCopy = true;

  template <class Lanes>
  static constexpr void store(Main* weight, RemainderOrCopy* copy, typename Lanes::Float master) {
    Lanes::store(weight, master);
    const auto bits = Lanes::bits_of(master);
    const auto odd = (bits >> 16) & Lanes::pattern(1U);
    const auto rounded = bits + Lanes::pattern(0x7fffU) + odd;
    Lanes::narrow(copy, Lanes::where_nan(master, bits, rounded) >> 16);
  }
};

struct F16Copy : PlainWeights {
  using RemainderOrCopy = std::uint16_t;
  static constexpr bool kStoresRemainderOrCopy = true;

  template <class Lanes>
  static constexpr void store(Main* weight, RemainderOrCopy* copy, typename Lanes::Float master) {
    Lanes::store(weight, master);
    Lanes::store_half(copy, master);
  }
};

/// Elements between two prefetches: one cache line of 16-bit numbers.
constexpr std::size_t kBlock = 32;
static_assert(kBlock * sizeof(std::uint16_t) == kCacheLine);

/// Prefetches the lines of a later block. Prefetches past the end of an array are harmless. The
/// hardware prefetcher does not keep up with this number of streams. The distances were measured
/// (README.md).
class Prefetch {
 public:
  explicit Prefetch(bool wide_weights) : wide_(wide_weights ? 384 : 2560) {
    // Hides the distances from gcc, which would rebase every address on them: 3% slower.
    asm("" : "+r"(narrow_), "+r"(wide_));
  }

  /// Prefetch distance in bytes for an array of at most 16-bit numbers (`narrow`) or of others.
  [[nodiscard]] std::size_t bytes(bool narrow) const { return narrow ? narrow_ : wide_; }

  template <class T>
  void of(const T* from) const {
    const char* ahead = reinterpret_cast<const char*>(from) + bytes(sizeof(T) <= 2);
    for (std::size_t line = 0; line < kBlock * sizeof(T); line += kCacheLine) {
      __builtin_prefetch(ahead + line);
    }
  }

 private:
  std::size_t narrow_ = 384;
  std::size_t wide_;
};

}  // namespace

}  // namespace ballast::cpu_adam

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
