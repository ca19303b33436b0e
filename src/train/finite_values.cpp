#include "src/train/finite_values.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "ballast/core/convert.h"
#include "ballast/core/error.h"

namespace ballast::train {
namespace {

/// The exponent bits of a type in each element of a word, and the lowest of these bits. Adding that
/// bit carries into the sign only if the exponent is all ones, and never into the next element.
struct Exponents {
  std::uint64_t all;
  std::uint64_t lowest;
  std::uint64_t carry;
};

constexpr std::uint64_t in_each(std::uint64_t bits, unsigned width) {
  std::uint64_t word = bits;
  for (unsigned shift = width; shift < 64; shift *= 2) word |= word << shift;
  return word;
}

constexpr Exponents exponents_of(DType type) {
  switch (type) {
    case DType::bf16:
      return {in_each(0x7f80, 16), in_each(0x0080, 16), in_each(0x8000, 16)};
    case DType::f16:
      return {in_each(0x7c00, 16), in_each(0x0400, 16), in_each(0x8000, 16)};
    default:
      return {in_each(0x7f800000, 32), in_each(0x00800000, 32), in_each(0x80000000, 32)};
  }
}

bool has_not_finite(ConstHostBytes bytes, const Exponents& exponents) {
  std::uint64_t found = 0;
  std::size_t at = 0;
  for (; at + sizeof(std::uint64_t) <= bytes.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    found |= (word & exponents.all) + exponents.lowest;
  }
  if (at < bytes.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
    found |= (word & exponents.all) + exponents.lowest;
  }
  return (found & exponents.carry) != 0;
}

float value_at(ConstHostBytes bytes, DType type, Elems index) {
  float value = 0.0F;
  const std::size_t width = size_of(type);
  std::array<std::byte, sizeof(float)> element{};
  std::memcpy(element.data(), bytes.data() + index * width, width);
  decode(ConstHostBytes(element).first(width), type, {&value, 1});
  return value;
}

}  // namespace

std::optional<Elems> first_not_finite(ConstHostBytes bytes, DType type) {
  if (!has_not_finite(bytes, exponents_of(type))) return std::nullopt;
  for (Elems i = 0; i < bytes.size() / size_of(type); ++i) {
    if (!std::isfinite(value_at(bytes, type, i))) return i;
  }
  return std::nullopt;
}

std::string explain_not_finite(const std::string& tensor, ConstHostBytes bytes, DType type,
                               Elems index, Elems first) {
  const float value = value_at(bytes, type, index);
  return fmt::format("tensor '{}' has {} at element {}, with which every loss would be NaN", tensor,
                     std::isnan(value) ? "NaN"
                     : value > 0.0F    ? "inf"
                                       : "-inf",
                     first + index);
}

}  // namespace ballast::train
