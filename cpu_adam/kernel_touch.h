#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {
namespace {

/// The ceiling of an update: the same lines loaded and stored in the same way, and as good as
/// nothing computed. What is loaded is stored unchanged; arrays that are only stored get zeros.
template <class Lanes>
void run_touch(const TouchedArray* arrays, std::size_t count, std::size_t rows) noexcept {
  constexpr std::size_t kStep = Lanes::kWidth * sizeof(std::uint32_t);
  // Hides from the compiler that nothing changes.
  std::uint32_t nothing = 0;
  asm volatile("" : "+r"(nothing));
  const auto unchanged = Lanes::pattern(nothing);
  auto seen = unchanged;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t n = 0; n < count; ++n) {
      const TouchedArray& array = arrays[n];
      std::byte* from = array.data + row * array.row_bytes;
      for (std::size_t at = 0; at + kCacheLine <= array.row_bytes; at += kCacheLine) {
        for (std::size_t i = at; i < at + kCacheLine; i += kStep) {
          auto* lanes = reinterpret_cast<float*>(from + i);
          const auto value = array.load ? Lanes::bits_of(Lanes::load(lanes)) : unchanged;
          if (array.store) {
            Lanes::store(lanes, Lanes::number_of(value | unchanged));
          } else {
            seen = seen | value;
          }
        }
      }
    }
  }
  std::uint16_t sink[Lanes::kWidth];
  Lanes::narrow(sink, seen);
  asm volatile("" : : "r"(sink) : "memory");
}

}  // namespace
}  // namespace ballast::cpu_adam
