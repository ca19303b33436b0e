#include "src/formats/mxfp4.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/text/json.h"

#include "src/formats/safetensors_header.h"

namespace ballast::formats::mxfp4 {
namespace {

using text::printable;

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

std::optional<Pairing> pair(const WeightPlace& place, const FindPlace& find) {
  if (place.tensor->dtype != "U8" || !place.tensor->name.ends_with(kCodesSuffix)) return {};
  const std::vector<std::uint64_t>& shape = place.tensor->shape;
  if (shape.size() != 4 || shape.back() != kCodes || place.tensor->elements == 0) {
    refuse_tensor(
        place,
        fmt::format("has shape {}, but matrices in MXFP4 have 4 dimensions, the last of size {}",
                    format_shape(shape), kCodes));
  }
  std::string name = place.tensor->name;
  name.resize(name.size() - kCodesSuffix.size());
  const std::string expected = name + std::string(kScalesSuffix);
  const WeightPlace* const scales = find(expected);
  if (scales == nullptr) {
    refuse_tensor(place,
                  fmt::format("is a matrix in MXFP4, but tensor '{}' with its scales is missing",
                              printable(expected)));
  }
  const std::vector<std::uint64_t> of_scales(shape.begin(), shape.end() - 1);
  if (scales->tensor->dtype != place.tensor->dtype || scales->tensor->shape != of_scales) {
    refuse_tensor(*scales,
                  fmt::format("is {} {}, but the scales of '{}' are {} {}", scales->tensor->dtype,
                              format_shape(scales->tensor->shape), printable(place.tensor->name),
                              place.tensor->dtype, format_shape(of_scales)));
  }
  const Elems elements = 2 * place.tensor->elements;
  return Pairing{
      .dequantized = {.name = name,
                      .dtype = std::string(dtype_name(DType::bf16)),
                      .shape = {shape[0], shape[2] * kBlock, shape[1]},
                      .elements = elements,
                      .bytes = elements * sizeof(Bf16)},
      .quantized = {.format = QuantizedWeights::Format::mxfp4, .codes = place, .scales = *scales},
      .parts = {scales->tensor}};
}

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

namespace {

/// The code of the nearest value; the middle of two values gets the even code.
unsigned code_of(float value) {
  constexpr std::array<float, 7> kMiddles = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  const float size = std::abs(value);
  unsigned code = 0;
  for (unsigned i = 0; i < kMiddles.size(); ++i) {
    const bool up_at_middle = i % 2 == 1;  // from an odd code to an even one
    if (size > kMiddles[i] || (up_at_middle && size == kMiddles[i])) code = i + 1;
  }
  return code + (std::signbit(value) ? 8U : 0U);
}

float value_of(unsigned code) {
  const float value = kValues[code % kValues.size()];
  return code < kValues.size() ? value : -value;
}

struct Encoded {
  std::array<unsigned, kBlock> codes = {};
  double error = 0.0;  // sum of squares
};

Encoded encode_with(const float* values, Elems step, int exponent) {
  Encoded encoded;
  for (Elems i = 0; i < kBlock; ++i) {
    encoded.codes[i] = code_of(std::ldexp(values[i * step], -exponent));
    const double found = std::ldexp(value_of(encoded.codes[i]), exponent);
    encoded.error += (found - values[i * step]) * (found - values[i * step]);
  }
  return encoded;
}

}  // namespace

std::uint8_t encode(const float* values, Elems step, std::span<std::byte, kCodes> codes) {
  constexpr int kLargestExponent = 2;  // of 4, the largest power of two in E2M1
  float largest = 0.0F;
  for (Elems i = 0; i < kBlock; ++i) largest = std::max(largest, std::abs(values[i * step]));
  const int found = largest > 0.0F ? std::ilogb(largest) - kLargestExponent : 0;
  int exponent = std::clamp(found, -kBias, kBias - 1);
  Encoded best = encode_with(values, step, exponent);
  if (const Encoded other = encode_with(values, step, exponent + 1); other.error < best.error) {
    best = other;
    ++exponent;
  }
  for (Elems i = 0; i < kCodes; ++i) {
    codes[i] = static_cast<std::byte>(best.codes[2 * i] | best.codes[2 * i + 1] << 4U);
  }
  return static_cast<std::uint8_t>(exponent + kBias);
}

void decode(std::span<const std::byte, kCodes> codes, std::uint8_t scale,
            std::span<float, kBlock> out) {
  for (Elems i = 0; i < kBlock; ++i) {
    const auto pair = std::to_integer<unsigned>(codes[i / 2]);
    out[i] = std::ldexp(value_of(i % 2 == 0 ? pair & 15U : pair >> 4U), scale - kBias);
  }
}

}  // namespace ballast::formats::mxfp4
