#pragma once

#include <cstddef>

#include "cpu_adam/kernel_formats.h"

namespace ballast::cpu_adam {
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
}  // namespace ballast::cpu_adam
