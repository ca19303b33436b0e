#include "src/formats/mxfp4.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ballast::formats::mxfp4 {
namespace {

/// Values of E2M1 without their sign, which is bit 3.
constexpr std::array<float, 8> kValues = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
constexpr int kBias = 127;
constexpr std::uint8_t kNotANumber = 255;

/// The values of all codes with a scale. They have at most two bits, so nothing is rounded.
std::array<Bf16, 16> values_with(std::uint8_t scale) {
  std::array<Bf16, 16> values;
  for (std::size_t code = 0; code < values.size(); ++code) {
    float value = std::ldexp(kValues[code % kValues.size()], scale - kBias);
    if (scale == kNotANumber) value = std::numeric_limits<float>::quiet_NaN();
    values[code] = to_bf16(code < kValues.size() ? value : -value);
  }
  return values;
}

}  // namespace

void decode(std::span<const std::byte> codes, std::span<const std::byte> scales, Elems first,
            std::span<Bf16> out) {
  static const auto tables = [] {
    std::array<std::array<Bf16, 16>, 256> all;
    for (std::size_t scale = 0; scale < all.size(); ++scale) {
      all[scale] = values_with(static_cast<std::uint8_t>(scale));
    }
    return all;
  }();
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Elems at = first + i;
    const auto& values = tables[std::to_integer<std::size_t>(scales[at / kBlock])];
    const auto pair = std::to_integer<std::size_t>(codes[at / 2]);
    out[i] = values[at % 2 == 0 ? pair & 15U : pair >> 4U];
  }
}

}  // namespace ballast::formats::mxfp4
