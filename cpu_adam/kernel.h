#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/variant.h"

#ifdef __FAST_MATH__
#error "-ffast-math would let instruction sets differ in their results"
#endif

/// The update, written once over `Lanes`: a few numbers side by side. Each kernel_*.cpp includes
/// this with its own compiler flags, so nothing here may have external linkage: the linker keeps
/// one copy of an inline function, and it might be the one that this CPU cannot run.
///
/// `Lanes` has
///   kWidth                    numbers side by side
///   Float, Bits               kWidth floats, and kWidth 32-bit patterns, with + - * / and + - & |
///   << >> broadcast(float)          -> Float pattern(std::uint32_t)    -> Bits load(p), store(p,
///   Float)  floats, aligned to their own size only widen(p), narrow(p, Bits) 16-bit patterns:
///   zero-extended, low halves fma(a, b, c), sqrt(a)     rounded once bits_of(Float),
///   number_of(Bits) where_nan(Float, Bits yes, Bits no)
namespace ballast::cpu_adam {
namespace {

/// The constants of one update in every lane.
template <class Lanes>
struct Constants {
  using Float = typename Lanes::Float;

  Float gradient_scale, decay, lerp_weight, beta2, gradient_weight, bias_correction2_sqrt, epsilon,
      step_size;
  bool lerp_from_gradient;

  explicit Constants(const Coefficients& from)
      : gradient_scale(Lanes::broadcast(from.gradient_scale)),
        decay(Lanes::broadcast(from.decay)),
        lerp_weight(Lanes::broadcast(from.lerp_weight)),
        beta2(Lanes::broadcast(from.beta2)),
        gradient_weight(Lanes::broadcast(from.gradient_weight)),
        bias_correction2_sqrt(Lanes::broadcast(from.bias_correction2_sqrt)),
        epsilon(Lanes::broadcast(from.epsilon)),
        step_size(Lanes::broadcast(from.step_size)),
        lerp_from_gradient(from.lerp_from_gradient) {}
};

/// Updates the moments at `first` and `second` and returns the new master weight. The order of
/// operations is torch.optim.AdamW's (one tensor at a time); see README.md.
template <class Lanes>
inline typename Lanes::Float update(const Constants<Lanes>& k, typename Lanes::Float master,
                                    float* first, float* second, typename Lanes::Float gradient) {
  using Float = typename Lanes::Float;
  const Float g = gradient * k.gradient_scale;
  Float m = Lanes::load(first);
  Float v = Lanes::load(second);
  const Float distance = g - m;
  if (k.lerp_from_gradient) {
    m = Lanes::fma(k.lerp_weight, distance, g);
  } else {
    m = Lanes::fma(k.lerp_weight, distance, m);
  }
  v = Lanes::fma(k.gradient_weight * g, g, v * k.beta2);
  Lanes::store(first, m);
  Lanes::store(second, v);
  const Float denominator = Lanes::sqrt(v) / k.bias_correction2_sqrt + k.epsilon;
  return master * k.decay - k.step_size * m / denominator;
}

/// join_master of core/dtype.h.
template <class Lanes>
inline typename Lanes::Float join(const std::uint16_t* weight, const std::uint16_t* remainder) {
  using Bits = typename Lanes::Bits;
  const Bits high = Lanes::widen(weight) << 16;
  const Bits low = Lanes::widen(remainder);
  const Bits carry = (low << 1) & Lanes::pattern(0x10000U);
  const Bits joined = high | low;
  return Lanes::number_of(Lanes::where_nan(Lanes::number_of(high), joined, joined - carry));
}

/// split_master of core/dtype.h for the result of an operation: such a NaN is quiet already.
template <class Lanes>
inline void split(typename Lanes::Float master, std::uint16_t* weight, std::uint16_t* remainder) {
  using Bits = typename Lanes::Bits;
  const Bits bits = Lanes::bits_of(master);
  const Bits rounded = bits + Lanes::pattern(0x8000U);
  Lanes::narrow(weight, Lanes::where_nan(master, bits, rounded) >> 16);
  Lanes::narrow(remainder, bits);
}

/// kWidth elements of a split shard. Arguments as in SplitShard.
template <class Lanes>
inline void update_split(const Constants<Lanes>& k, std::uint16_t* weight, std::uint16_t* remainder,
                         float* first, float* second, const std::uint16_t* gradient) {
  const auto g = Lanes::number_of(Lanes::widen(gradient) << 16);
  const auto master = join<Lanes>(weight, remainder);
  split<Lanes>(update<Lanes>(k, master, first, second, g), weight, remainder);
}

/// kWidth elements of a plain shard. Arguments as in PlainShard.
template <class Lanes>
inline void update_plain(const Constants<Lanes>& k, float* weight, float* first, float* second,
                         const float* gradient) {
  const auto g = Lanes::load(gradient);
  Lanes::store(weight, update<Lanes>(k, Lanes::load(weight), first, second, g));
}

/// Elements between two prefetches (one cache line of 16-bit numbers), and how far they look ahead.
/// The hardware does not keep up with so many streams by itself; see README.md for what it gains.
constexpr std::size_t kBlock = 32;
constexpr std::size_t kAhead = 256;
static_assert(kBlock * sizeof(std::uint16_t) == kCacheLine);

/// Asks for the block that is kAhead elements behind `from`; past the end of an array that is
/// harmless.
template <class T>
inline void prefetch(const T* from) {
  const char* ahead = reinterpret_cast<const char*>(from) + kAhead * sizeof(T);
  for (std::size_t line = 0; line < kBlock * sizeof(T); line += kCacheLine) {
    __builtin_prefetch(ahead + line);
  }
}

/// The elements that do not fill the lanes go through this buffer, so that they meet the same
/// instructions as all others.
template <class Lanes, class T>
struct Padded {
  T values[Lanes::kWidth] = {};

  void fill(const T* from, std::size_t count) { __builtin_memcpy(values, from, count * sizeof(T)); }
  void drain(T* to, std::size_t count) const { __builtin_memcpy(to, values, count * sizeof(T)); }
};

template <class Lanes>
void run_split(const Coefficients& coefficients, const SplitShard& shard) noexcept {
  const std::size_t size = shard.size;
  if (size == 0) return;
  const Constants<Lanes> k(coefficients);
  std::uint16_t* weight = &shard.weight->bits;
  std::uint16_t* remainder = shard.remainder;
  float* first = shard.first_moment;
  float* second = shard.second_moment;
  const std::uint16_t* gradient = &shard.gradient->bits;

  std::size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    prefetch(weight + i);
    prefetch(remainder + i);
    prefetch(first + i);
    prefetch(second + i);
    prefetch(gradient + i);
    for (std::size_t j = i; j < i + kBlock; j += Lanes::kWidth) {
      update_split<Lanes>(k, weight + j, remainder + j, first + j, second + j, gradient + j);
    }
  }
  for (; i + Lanes::kWidth <= size; i += Lanes::kWidth) {
    update_split<Lanes>(k, weight + i, remainder + i, first + i, second + i, gradient + i);
  }
  const std::size_t rest = size - i;
  if (rest == 0) return;
  Padded<Lanes, std::uint16_t> w, r, g;
  Padded<Lanes, float> m, v;
  w.fill(weight + i, rest);
  r.fill(remainder + i, rest);
  g.fill(gradient + i, rest);
  m.fill(first + i, rest);
  v.fill(second + i, rest);
  update_split<Lanes>(k, w.values, r.values, m.values, v.values, g.values);
  w.drain(weight + i, rest);
  r.drain(remainder + i, rest);
  m.drain(first + i, rest);
  v.drain(second + i, rest);
}

template <class Lanes>
void run_plain(const Coefficients& coefficients, const PlainShard& shard) noexcept {
  const std::size_t size = shard.size;
  if (size == 0) return;
  const Constants<Lanes> k(coefficients);
  float* weight = shard.weight;
  float* first = shard.first_moment;
  float* second = shard.second_moment;
  const float* gradient = shard.gradient;

  std::size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    prefetch(weight + i);
    prefetch(first + i);
    prefetch(second + i);
    prefetch(gradient + i);
    for (std::size_t j = i; j < i + kBlock; j += Lanes::kWidth) {
      update_plain<Lanes>(k, weight + j, first + j, second + j, gradient + j);
    }
  }
  for (; i + Lanes::kWidth <= size; i += Lanes::kWidth) {
    update_plain<Lanes>(k, weight + i, first + i, second + i, gradient + i);
  }
  const std::size_t rest = size - i;
  if (rest == 0) return;
  Padded<Lanes, float> p, g, m, v;
  p.fill(weight + i, rest);
  g.fill(gradient + i, rest);
  m.fill(first + i, rest);
  v.fill(second + i, rest);
  update_plain<Lanes>(k, p.values, m.values, v.values, g.values);
  p.drain(weight + i, rest);
  m.drain(first + i, rest);
  v.drain(second + i, rest);
}

}  // namespace
}  // namespace ballast::cpu_adam
