#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "ballast/core/units.h"
#include "ballast/cpu_adam/optimizer.h"

#include "cpu_adam/kernel_adamw.h"
#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/kernel_moments.h"
#include "cpu_adam/kernel_rules.h"
#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

namespace {

/// The check values of whole blocks of weights: see WeightChecks. Each step of the hash is a
/// bijection. The shift lets the sign bits of several weights count.
inline void block_checks(const Bf16* weights, std::size_t blocks, std::uint16_t* values) noexcept {
  constexpr std::uint16_t kFactor = 0x9e37;
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t column = 0; column < WeightChecks::kColumns; ++column) {
      std::uint16_t hash = 0;
      for (std::size_t row = 0; row < WeightChecks::kRows; ++row) {
        const std::uint16_t mixed = hash ^ weights[row * WeightChecks::kColumns + column].bits;
        const auto product = static_cast<std::uint16_t>(std::uint32_t{mixed} * kFactor);
        hash = product ^ (product >> 7U);
      }
      values[column] = hash;
    }
    weights += WeightChecks::kBlock;
    values += WeightChecks::kColumns;
  }
}

}  // namespace

namespace {

/// The sum of squares in double: element i goes to sum i modulo 16, and the sums are added in
/// order, whatever the width of the lanes. A square of a float is exact in double and no sum of
/// them overflows, so the result is finite if and only if every gradient is.
///
/// `Lanes::Squares` holds the 16 sums: add(Float, part) adds kWidth squares to the sums from
/// part * kWidth on, store(double*) writes all 16.
template <class Lanes, class Grad>
double sum_squares(const void* gradient, std::size_t size) noexcept {
  constexpr std::size_t kSums = 16;
  constexpr std::size_t kParts = kSums / Lanes::kWidth;
  const auto* from = static_cast<const typename Grad::Stored*>(gradient);
  typename Lanes::Squares squares;
  const auto add = [&squares](const typename Grad::Stored* sixteen) {
    for (std::size_t part = 0; part < kParts; ++part) {
      squares.add(Grad::template load<Lanes>(sixteen + part * Lanes::kWidth), part);
    }
  };
  std::size_t i = 0;
  for (; i + kSums <= size; i += kSums) add(from + i);
  if (i < size) {
    typename Grad::Stored rest[kSums] = {};
    __builtin_memcpy(rest, from + i, (size - i) * sizeof rest[0]);
    add(rest);
  }
  double sums[kSums];
  squares.store(sums);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

namespace {

/// Loads and stores the cache lines of [from, from + bytes) almost without computing: loaded values
/// are stored unchanged; an array that is only stored becomes zero.
template <class Lanes, bool kLoads, bool kStores, bool kPrefetches, bool kStreams>
void touch_lines(std::byte* from, std::size_t bytes, std::size_t ahead,
                 typename Lanes::Bits unchanged, typename Lanes::Bits& seen) {
  constexpr std::size_t kStep = Lanes::kWidth * sizeof(std::uint32_t);
  for (std::size_t at = 0; at + kCacheLine <= bytes; at += kCacheLine) {
    if constexpr (kPrefetches) __builtin_prefetch(from + at + ahead);
    for (std::size_t i = at; i < at + kCacheLine; i += kStep) {
      auto* lanes = reinterpret_cast<float*>(from + i);
      const auto value = kLoads ? Lanes::bits_of(Lanes::load(lanes)) : unchanged;
      if constexpr (!kStores) {
        seen = seen | value;
      } else if constexpr (kStreams) {
        Lanes::stream(lanes, Lanes::number_of(value | unchanged));
      } else {
        Lanes::store(lanes, Lanes::number_of(value | unchanged));
      }
    }
  }
}

template <class Lanes, bool kPrefetches, bool kStreams>
void touch_stretch(const TouchedArray& array, std::byte* from, std::size_t bytes, std::size_t ahead,
                   typename Lanes::Bits unchanged, typename Lanes::Bits& seen) {
  if (!array.store) {
    touch_lines<Lanes, true, false, kPrefetches, false>(from, bytes, ahead, unchanged, seen);
  } else if (array.load) {
    touch_lines<Lanes, true, true, kPrefetches, kStreams>(from, bytes, ahead, unchanged, seen);
  } else {
    // Streaming stores read nothing, so there is nothing to prefetch.
    touch_lines<Lanes, false, true, kPrefetches && !kStreams, kStreams>(from, bytes, ahead,
                                                                        unchanged, seen);
  }
}

template <class Lanes, bool kPrefetches, bool kStreams>
void touch_arrays(const TouchedArray* arrays, std::size_t count, std::size_t rows,
                  std::size_t stretch) {
  constexpr std::size_t kPartsOfRow = TouchedArray::kRow / kCacheLine;
  // Hides from the compiler that the values do not change.
  std::uint32_t nothing = 0;
  asm volatile("" : "+r"(nothing));
  const auto unchanged = Lanes::pattern(nothing);
  auto seen = unchanged;
  const Prefetch distances(arrays[0].row_bytes == TouchedArray::kRow * sizeof(float));
  const std::size_t parts = rows * kPartsOfRow;
  for (std::size_t part = 0; part < parts; part += stretch) {
    const std::size_t here = part + stretch < parts ? stretch : parts - part;
    for (std::size_t n = 0; n < count; ++n) {
      const TouchedArray& array = arrays[n];
      const std::size_t part_bytes = array.row_bytes / kPartsOfRow;
      const bool narrow = array.row_bytes == TouchedArray::kRow * sizeof(std::uint16_t);
      touch_stretch<Lanes, kPrefetches, kStreams>(array, array.data + part * part_bytes,
                                                  here * part_bytes, distances.bytes(narrow),
                                                  unchanged, seen);
    }
  }
  if constexpr (kStreams) Lanes::end_streams();
  std::uint16_t sink[Lanes::kWidth];
  Lanes::narrow(sink, seen);
  asm volatile("" : : "r"(sink) : "memory");
}

/// Moves the data of an update in one way (TouchWay). Streaming stores need whole lines, so
/// unaligned arrays turn them off.
template <class Lanes>
void run_touch(const TouchedArray* arrays, std::size_t count, std::size_t rows, std::size_t stretch,
               bool prefetches, bool streams) noexcept {
  for (std::size_t n = 0; n < count; ++n) {
    if (reinterpret_cast<std::uintptr_t>(arrays[n].data) % kCacheLine != 0) streams = false;
  }
  if (prefetches) {
    streams ? touch_arrays<Lanes, true, true>(arrays, count, rows, stretch)
            : touch_arrays<Lanes, true, false>(arrays, count, rows, stretch);
  } else {
    streams ? touch_arrays<Lanes, false, true>(arrays, count, rows, stretch)
            : touch_arrays<Lanes, false, false>(arrays, count, rows, stretch);
  }
}

}  // namespace

}  // namespace ballast::cpu_adam

#ifdef __FAST_MATH__
#error "-ffast-math would let instruction sets differ in their results"
#endif

/// The update, written once over `Lanes`, a vector of numbers. Each kernel_*.cpp includes
/// this with its own compiler flags, so nothing here may have external linkage: the linker keeps
/// one copy of an inline function, possibly one that this CPU cannot run.
///
/// Members of `Lanes`:
/// - kWidth: number of lanes; Float and Bits: kWidth floats or 32-bit patterns, with
///   + - * and + - * & | ^ << >>
/// - broadcast(float), pattern(uint32), iota(): 0, 1, 2 ... as Bits
/// - load(p), store(p, Float): floats, aligned to their own size only
/// - stream(p, Float): a store that bypasses the caches; end_streams(): orders such stores
/// - widen(p), narrow(p, Bits): 16-bit patterns zero-extended, low halves; widen8, narrow8: bytes;
///   widen_upper(p), narrow_upper(p, Bits): 16-bit patterns as upper halves
/// - pair(low, high), unpair(Bits, low, high): 32-bit patterns whose halves lie in two arrays
/// - load_half(p), store_half(p, Float): IEEE binary16, to nearest even
/// - fma(a, b, c), sqrt(a), divide(a, b): rounded once
/// - bits_of(Float), number_of(Bits), to_float(Bits below 2^31)
/// - where_nan(Float, yes, no), where_zero(Bits, yes, no), where_less(Float, Float, yes, no):
///   selects Bits by lane; larger(Bits, Bits): unsigned maximum; zero_where_zero(Bits, bits),
///   zero_where_nan(Float, bits): `bits`, or 0 where the first is 0 or NaN
/// - Squares: 16 sums of squares in double, see kernel.h
///
/// Members of vectors for pairs (kernel_formats.h). Halves are the 16-bit halves of all lanes:
/// - load_halves(p), store_halves(p, Bits): 2 * kWidth of them
/// - merge(low, high): the low halves of one and the upper halves of the other
/// - separate(first, last): in place, 2 * kWidth floats to those with even and with odd numbers;
///   join(even, odd): the reverse
/// - without_carries(upper, lower), with_carries(upper, lower): subtracts or adds the highest bit
///   of each half of `lower`. A NaN stays a NaN when a carry is added.
/// - load_codes<has_sign>(p): 2 * kWidth codes as halves, with the sign extended or not;
///   add_where_coded<Kind>(halves, summand): adds to halves of codes other than zero
/// - store_codes<Kind>(bases, uppers, p, lowest): codes of 32 numbers, whose rounded patterns have
///   these upper halves. `lowest` becomes the minimum of itself and the codes.
///   none_below_two(lowest): whether all these codes are above 1
///
/// Members of vectors for two vectors in the order of unpacked halves (kernel_adamw.h):
/// - unpack_halves(low, high, first, last): the 2 * kWidth patterns with these lower and upper
///   halves; pack_halves(first, last, low, high): the reverse. pack_uppers(first, last): the upper
///   halves
/// - order_as_halves(first, last): in place, 2 * kWidth consecutive floats to the order of
///   unpack_halves(); order_as_floats(first, last): the reverse

namespace ballast::cpu_adam {

namespace {

/// The typed arrays of an update with fp32 moments.
template <class Weight, class Grad>
struct Arrays {
  typename Weight::Main* main;
  typename Weight::RemainderOrCopy* remainder_or_copy;
  float* first;
  float* second;
  const typename Grad::Stored* gradient;
};

/// The kWidth elements from index `i` on, for a rule. Everything is passed by value: references
/// would keep the compiler from holding addresses and constants in registers across the stores.
template <class Lanes, class Weight, class Grad>
struct Group {
  using Float = typename Lanes::Float;

  Arrays<Weight, Grad> arrays;
  Float gradient_scale;
  std::size_t i;

  constexpr Float gradient() const {
    return Grad::template load<Lanes>(arrays.gradient + i) * gradient_scale;
  }
  constexpr Float first() const { return Lanes::load(arrays.first + i); }
  constexpr Float second() const { return Lanes::load(arrays.second + i); }
  constexpr Float weight() const {
    return Weight::template load<Lanes>(arrays.main + i, remainder_or_copy());
  }
  constexpr void set_first(Float value) const { Lanes::store(arrays.first + i, value); }
  constexpr void set_second(Float value) const { Lanes::store(arrays.second + i, value); }
  constexpr void set_weight(Float value) const {
    Weight::template store<Lanes>(arrays.main + i, remainder_or_copy(), value);
  }
  /// Null for formats without a remainder or copy.
  constexpr typename Weight::RemainderOrCopy* remainder_or_copy() const {
    if constexpr (!Weight::kStoresRemainderOrCopy) return nullptr;
    return arrays.remainder_or_copy + i;
  }
};

template <class Lanes, class Rule, class Weight, class Grad>
constexpr void update_at(const Constants<Lanes>& k, Arrays<Weight, Grad> arrays, std::size_t i) {
  Rule::template apply<Lanes>(k, Group<Lanes, Weight, Grad>{arrays, k.gradient_scale, i});
}

/// Updates kCount groups of kWidth elements from index `i` on with a rule in parts. The order of
/// the parts hides the latencies of square roots and divisions, because a CPU looks only some
/// instructions ahead.
template <class Lanes, class Rule, std::size_t kCount, class Weight, class Grad>
constexpr void update_groups(const Constants<Lanes>& k, Arrays<Weight, Grad> arrays,
                             std::size_t i) {
  const auto group = [&](std::size_t n) {
    return Group<Lanes, Weight, Grad>{arrays, k.gradient_scale, i + n * Lanes::kWidth};
  };
  typename Lanes::Float first[kCount];
  typename Lanes::Float step[kCount];
  for (std::size_t n = 0; n < kCount; ++n) {
    const auto updated = Rule::template moments<Lanes>(k, group(n));
    first[n] = updated.first;
    step[n] = denominator_of<Lanes>(k, updated.second);
  }
  for (std::size_t n = 0; n < kCount; ++n) {
    step[n] = Rule::template step<Lanes>(k, first[n], step[n]);
  }
  for (std::size_t n = 0; n < kCount; ++n) {
    step[n] = Rule::template weight<Lanes>(k, group(n).weight(), step[n]);
  }
  for (std::size_t n = 0; n < kCount; ++n) group(n).set_weight(step[n]);
}

/// Updates kCount groups of kWidth elements from index `i` on.
template <class Lanes, class Rule, std::size_t kCount, class Weight, class Grad>
constexpr void update_some(const Constants<Lanes>& k, Arrays<Weight, Grad> arrays, std::size_t i) {
  if constexpr (requires { Rule::kInParts; }) {
    update_groups<Lanes, Rule, kCount>(k, arrays, i);
  } else {
    for (std::size_t n = 0; n < kCount; ++n) {
      update_at<Lanes, Rule>(k, arrays, i + n * Lanes::kWidth);
    }
  }
}

/// Buffer for the last elements when they do not fill the lanes, so that the same instructions
/// process all elements.
template <class Lanes, class T>
struct PaddedArray {
  T values[Lanes::kWidth] = {};

  void fill(const T* from, std::size_t count) { __builtin_memcpy(values, from, count * sizeof(T)); }
  void drain(T* to, std::size_t count) const { __builtin_memcpy(to, values, count * sizeof(T)); }
};

template <class Weight, class Grad>
inline Arrays<Weight, Grad> arrays_of(const Streams& s) {
  return {static_cast<typename Weight::Main*>(s.main),
          static_cast<typename Weight::RemainderOrCopy*>(s.remainder_or_copy),
          static_cast<float*>(s.first), static_cast<float*>(s.second),
          static_cast<const typename Grad::Stored*>(s.gradient)};
}

/// Updates the last elements, from index `i` on. It takes none of run()'s constants by reference,
/// so that the compiler keeps those in registers.
template <class Lanes, class Rule, class Weight, class Grad>
inline void update_rest(const Coefficients& coefficients, const Streams& s, std::size_t i) {
  const std::size_t rest = s.size - i;
  const auto a = arrays_of<Weight, Grad>(s);
  PaddedArray<Lanes, typename Weight::Main> main;
  PaddedArray<Lanes, typename Weight::RemainderOrCopy> remainder_or_copy;
  PaddedArray<Lanes, float> first;
  PaddedArray<Lanes, float> second;
  PaddedArray<Lanes, typename Grad::Stored> gradient;
  main.fill(a.main + i, rest);
  if constexpr (Weight::kLoadsRemainder) remainder_or_copy.fill(a.remainder_or_copy + i, rest);
  if constexpr (Rule::kFirst) first.fill(a.first + i, rest);
  if constexpr (Rule::kSecond) second.fill(a.second + i, rest);
  gradient.fill(a.gradient + i, rest);
  const Arrays<Weight, Grad> padded = {main.values, remainder_or_copy.values, first.values,
                                       second.values, gradient.values};
  update_some<Lanes, Rule, 1>(Constants<Lanes>(coefficients), padded, 0);
  main.drain(a.main + i, rest);
  if constexpr (Weight::kStoresRemainderOrCopy)
    remainder_or_copy.drain(a.remainder_or_copy + i, rest);
  if constexpr (Rule::kFirst) first.drain(a.first + i, rest);
  if constexpr (Rule::kSecond) second.drain(a.second + i, rest);
}

template <class Lanes, class Rule, class Weight, class Grad>
void run(const Coefficients& coefficients, const Streams& s) noexcept {
  if constexpr (requires { typename Rule::FromGradient; }) {
    using Other = typename Rule::FromGradient;
    if (coefficients.first_from_end && !std::is_same_v<Rule, Other>) {
      return run<Lanes, Other, Weight, Grad>(coefficients, s);
    }
  }
  const Prefetch ahead(sizeof(typename Weight::Main) == 4);
  const Constants<Lanes> k(coefficients);
  const auto a = arrays_of<Weight, Grad>(s);
  const std::size_t size = s.size;
  std::size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    ahead.of(a.main + i);
    if constexpr (Weight::kStoresRemainderOrCopy) ahead.of(a.remainder_or_copy + i);
    if constexpr (Rule::kFirst) ahead.of(a.first + i);
    if constexpr (Rule::kSecond) ahead.of(a.second + i);
    ahead.of(a.gradient + i);
    update_some<Lanes, Rule, kBlock / Lanes::kWidth>(k, a, i);
  }
  for (; i + Lanes::kWidth <= size; i += Lanes::kWidth) {
    update_some<Lanes, Rule, 1>(k, a, i);
  }
  if (i < size) update_rest<Lanes, Rule, Weight, Grad>(coefficients, s, i);
}

/// Calls `fill` with every pair of formats and their places in the tables of a variant.
constexpr void for_each_format(const auto& fill) {
  const auto with_gradients = [&fill](auto weight, Weights::Format format) {
    const int w = static_cast<int>(format);
    fill(weight, Bf16Gradient(), w, gradient_index(DType::bf16));
    fill(weight, F16Gradient(), w, gradient_index(DType::f16));
    fill(weight, F32Gradient(), w, gradient_index(DType::f32));
  };
  with_gradients(SplitWeights(), Weights::Format::split);
  with_gradients(PlainWeights(), Weights::Format::plain);
  with_gradients(Bf16Copy(), Weights::Format::copy_bf16);
  with_gradients(F16Copy(), Weights::Format::copy_f16);
}

/// The kernels of one optimizer. Those of compressed moments are the ones that serve all
/// optimizers.
template <class Lanes, class Rule>
constexpr void fill_optimizer(Variant& v) {
  const int o = static_cast<int>(Rule::kOptimizer);
  for_each_format([&v, o]<class Weight, class Grad>(Weight, Grad, int weight, int gradient) {
    v.fused[o][weight][gradient] = run<Lanes, Rule, Weight, Grad>;
    v.bf16_first[o][weight][gradient] = run_bf16_first<Lanes>;
    v.blockwise8[o][weight][gradient] = run_blockwise8<Lanes>;
  });
}

/// AdamW's own kernels for compressed moments. The scalar variant has none, so that tests compare
/// both ways to compute the same.
template <class Lanes>
constexpr void fill_adamw(Variant& v) {
  if constexpr (Lanes::kWidth > 1) {
    constexpr int o = static_cast<int>(Optimizer::adamw);
    for_each_format([&v]<class Weight, class Grad>(Weight, Grad, int weight, int gradient) {
      v.bf16_first[o][weight][gradient] = run_adamw_bf16_first<Lanes, Weight, Grad>;
      v.blockwise8[o][weight][gradient] = run_adamw_blockwise8<Lanes, Weight, Grad>;
    });
  }
}

template <class Lanes>
constexpr Variant make_variant(Isa isa) {
  Variant v{};
  v.isa = isa;
  [&v]<std::size_t... row>(std::index_sequence<row...>) {
    (fill_optimizer<Lanes, Rule<kOptimizers[row].type>>(v), ...);
  }
  (std::make_index_sequence<kOptimizers.size()>());
  fill_adamw<Lanes>(v);
  v.touch = run_touch<Lanes>;
  v.squares[gradient_index(DType::bf16)] = sum_squares<Lanes, Bf16Gradient>;
  v.squares[gradient_index(DType::f16)] = sum_squares<Lanes, F16Gradient>;
  v.squares[gradient_index(DType::f32)] = sum_squares<Lanes, F32Gradient>;
  v.checks = block_checks;
  return v;
}

}  // namespace

}  // namespace ballast::cpu_adam
