#include "src/formats/mxfp4.h"

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

}  // namespace ballast::formats::mxfp4
