#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/kernel_moments.h"
#include "cpu_adam/kernel_rules.h"
#include "cpu_adam/kernel_squares.h"
#include "cpu_adam/kernel_touch.h"
#include "cpu_adam/variant.h"

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
/// - widen(p), narrow(p, Bits): 16-bit patterns zero-extended, low halves; widen8, narrow8: bytes
/// - pair(low, high), unpair(Bits, low, high): 32-bit patterns whose halves lie in two arrays
/// - load_half(p), store_half(p, Float): IEEE binary16, to nearest even
/// - fma(a, b, c), sqrt(a), divide(a, b): rounded once
/// - bits_of(Float), number_of(Bits), to_float(Bits below 2^31)
/// - where_nan(Float, yes, no), where_zero(Bits, yes, no), where_less(Float, Float, yes, no):
///   selects Bits by lane; larger(Bits, Bits): unsigned maximum
/// - Squares: 16 sums of squares in double, see kernel_squares.h
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

/// Buffer for the last elements when they do not fill the lanes, so that the same instructions
/// process all elements.
template <class Lanes, class T>
struct Padded {
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
  Padded<Lanes, typename Weight::Main> main;
  Padded<Lanes, typename Weight::RemainderOrCopy> remainder_or_copy;
  Padded<Lanes, float> first, second;
  Padded<Lanes, typename Grad::Stored> gradient;
  main.fill(a.main + i, rest);
  if constexpr (Weight::kLoadsRemainder) remainder_or_copy.fill(a.remainder_or_copy + i, rest);
  if constexpr (Rule::kFirst) first.fill(a.first + i, rest);
  if constexpr (Rule::kSecond) second.fill(a.second + i, rest);
  gradient.fill(a.gradient + i, rest);
  const Arrays<Weight, Grad> padded = {main.values, remainder_or_copy.values, first.values,
                                       second.values, gradient.values};
  update_at<Lanes, Rule, Weight, Grad>(Constants<Lanes>(coefficients), padded, 0);
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
    for (std::size_t group = 0; group < kBlock; group += Lanes::kWidth) {
      update_at<Lanes, Rule, Weight, Grad>(k, a, i + group);
    }
  }
  for (; i + Lanes::kWidth <= size; i += Lanes::kWidth) {
    update_at<Lanes, Rule, Weight, Grad>(k, a, i);
  }
  if (i < size) update_rest<Lanes, Rule, Weight, Grad>(coefficients, s, i);
}

template <class Lanes, class Rule, class Weight>
constexpr void fill_gradients(FusedKernel (&row)[kGradientTypes]) {
  row[gradient_index(DType::bf16)] = run<Lanes, Rule, Weight, Bf16Gradient>;
  row[gradient_index(DType::f16)] = run<Lanes, Rule, Weight, F16Gradient>;
  row[gradient_index(DType::f32)] = run<Lanes, Rule, Weight, F32Gradient>;
}

template <class Lanes, class Rule>
constexpr void fill_weights(FusedKernel (&table)[Weights::kFormats][kGradientTypes]) {
  fill_gradients<Lanes, Rule, SplitWeights>(table[static_cast<int>(Weights::Format::split)]);
  fill_gradients<Lanes, Rule, PlainWeights>(table[static_cast<int>(Weights::Format::plain)]);
  fill_gradients<Lanes, Rule, Bf16Copy>(table[static_cast<int>(Weights::Format::copy_bf16)]);
  fill_gradients<Lanes, Rule, F16Copy>(table[static_cast<int>(Weights::Format::copy_f16)]);
}

template <class Lanes>
constexpr Variant make_variant(Isa isa) {
  Variant v{};
  v.isa = isa;
  fill_weights<Lanes, AdamWRule<>>(v.fused[static_cast<int>(Optimizer::adamw)]);
  fill_weights<Lanes, AdamRule<>>(v.fused[static_cast<int>(Optimizer::adam)]);
  fill_weights<Lanes, AdagradRule>(v.fused[static_cast<int>(Optimizer::adagrad)]);
  fill_weights<Lanes, LionRule>(v.fused[static_cast<int>(Optimizer::lion)]);
  fill_weights<Lanes, SgdRule>(v.fused[static_cast<int>(Optimizer::sgd)]);
  v.bf16_first = run_bf16_first<Lanes>;
  v.blockwise8 = run_blockwise8<Lanes>;
  v.touch = run_touch<Lanes>;
  v.squares[gradient_index(DType::bf16)] = sum_squares<Lanes, Bf16Gradient>;
  v.squares[gradient_index(DType::f16)] = sum_squares<Lanes, F16Gradient>;
  v.squares[gradient_index(DType::f32)] = sum_squares<Lanes, F32Gradient>;
  return v;
}

}  // namespace
}  // namespace ballast::cpu_adam
