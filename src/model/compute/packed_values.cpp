#include "ballast/model/packed_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace ballast::model {

namespace {

/// Smallest magnitude that is inverted, so that a block of zeros is encoded as zeros.
constexpr float kLeastScale = 1e-38F;

float load_float(const std::byte* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// Midpoints between neighbours of `table`.
template <std::size_t size>
std::array<float, size - 1> middles_of(const std::array<float, size>& table) {
  std::array<float, size - 1> middles;
  for (std::size_t i = 0; i + 1 < size; ++i) middles[i] = (table[i] + table[i + 1]) / 2.0F;
  return middles;
}

template <std::size_t size>
std::uint8_t nearest(const std::array<float, size>& middles, float value) {
  return static_cast<std::uint8_t>(std::lower_bound(middles.begin(), middles.end(), value) -
                                   middles.begin());
}

/// Returns NaN if a value is NaN.
float largest_magnitude(std::span<const float> values) {
  float most = 0.0F;
  for (const float value : values) {
    const float magnitude = std::fabs(value);
    if (!(magnitude <= most)) most = std::isnan(most) ? most : magnitude;
  }
  return most;
}

/// Calls `take(i, code)` for each value of a block with `scale`.
template <std::size_t size, class Take>
void encode_block(const std::array<float, size>& middles, std::span<const float> values,
                  float scale, Take take) {
  const float inverse = 1.0F / std::max(scale, kLeastScale);
  for (std::size_t i = 0; i < values.size(); ++i) {
    take(i, nearest(middles, std::clamp(values[i] * inverse, -1.0F, 1.0F)));
  }
}

/// Encodes `values` with dynamic_map(), with one scale per `block` values.
void encode_bytes(std::span<const float> values, Elems block, std::byte* codes, float* scales) {
  static const auto middles = middles_of(dynamic_map());
  for (Elems first = 0; first < values.size(); first += block, ++scales) {
    const auto part = values.subspan(first, std::min<Elems>(block, values.size() - first));
    *scales = largest_magnitude(part);
    encode_block(middles, part, *scales, [&](std::size_t i, std::uint8_t code) {
      codes[first + i] = static_cast<std::byte>(code);
    });
  }
}

void encode_nf4(std::span<const float> values, Elems block, std::byte* codes, float* scales) {
  static const auto middles = middles_of(nf4_values());
  for (Elems first = 0; first < values.size(); first += block, ++scales) {
    const auto part = values.subspan(first, std::min<Elems>(block, values.size() - first));
    *scales = largest_magnitude(part);
    encode_block(middles, part, *scales, [&](std::size_t i, std::uint8_t code) {
      std::byte& pair = codes[(first + i) / 2];
      pair = i % 2 == 0 ? static_cast<std::byte>(code << 4U) : pair | static_cast<std::byte>(code);
    });
  }
}

/// Builds bitsandbytes' table in fp32, as it does: for each number of exponent bits, the midpoints
/// of equal parts of [0.1, 1], times a power of ten.
std::array<float, 256> make_dynamic_map() {
  std::array<float, 256> map = {};
  std::size_t count = 0;
  for (int exponent = 0; exponent < 7; ++exponent) {
    const int parts = 1 << exponent;
    // Like PyTorch's linspace: the second half counts from the end, and each sum is rounded once.
    const float step = (1.0F - 0.1F) / static_cast<float>(parts);
    const auto end_of = [parts, step](int i) {
      const double from_first = double{0.1F} + double{step} * i;
      const double from_last = 1.0 - double{step} * (parts - i);
      return static_cast<float>(2 * i < parts ? from_first : from_last);
    };
    const auto power = static_cast<float>(std::pow(10.0, exponent - 6));
    for (int i = 0; i < parts; ++i) {
      const float value = power * ((end_of(i) + end_of(i + 1)) / 2.0F);
      map[count++] = value;
      map[count++] = -value;
    }
  }
  map[count++] = 0.0F;
  map[count++] = 1.0F;
  std::sort(map.begin(), map.end());
  return map;
}

}  // namespace

const std::array<float, 16>& nf4_values() {
  static constexpr std::array<float, 16> kValues = {-1.0F,
                                                    -0.6961928009986877F,
                                                    -0.5250730514526367F,
                                                    -0.39491748809814453F,
                                                    -0.28444138169288635F,
                                                    -0.18477343022823334F,
                                                    -0.09105003625154495F,
                                                    0.0F,
                                                    0.07958029955625534F,
                                                    0.16093020141124725F,
                                                    0.24611230194568634F,
                                                    0.33791524171829224F,
                                                    0.44070982933044434F,
                                                    0.5626170039176941F,
                                                    0.7229568362236023F,
                                                    1.0F};
  return kValues;
}

const std::array<float, 256>& dynamic_map() {
  static const std::array<float, 256> kMap = make_dynamic_map();
  return kMap;
}

void encode(const Quantization& quantization, std::span<const float> values, std::byte* codes,
            float* scales) {
  if (quantization.format == Quantization::Format::nf4) {
    return encode_nf4(values, quantization.block(), codes, scales);
  }
  encode_bytes(values, quantization.block(), codes, scales);
}

void store_scales(const QuantizedArrays& arrays, std::span<const float> scales,
                  std::byte* quantized) {
  if (arrays.nested_count == 0) {
    std::memcpy(quantized + arrays.scales, scales.data(), scales.size_bytes());
    return;
  }
  double sum = 0.0;
  for (const float scale : scales) sum += scale;
  const auto mean = static_cast<float>(sum / static_cast<double>(scales.size()));
  std::vector<float> centred(scales.begin(), scales.end());
  for (float& scale : centred) scale -= mean;
  std::vector<float> nested(arrays.nested_count);
  encode_bytes(centred, kNestedBlock, quantized + arrays.scales, nested.data());
  std::memcpy(quantized + arrays.nested, nested.data(), nested.size() * sizeof(float));
  std::memcpy(quantized + arrays.mean, &mean, sizeof mean);
}

float scale_at(const QuantizedArrays& arrays, const std::byte* quantized, Elems index) {
  const std::byte* const scales = quantized + arrays.scales;
  if (arrays.nested_count == 0) return load_float(scales + index * sizeof(float));
  const float value = dynamic_map()[static_cast<std::size_t>(scales[index])];
  const float centred =
      value * load_float(quantized + arrays.nested + index / kNestedBlock * sizeof(float));
  return centred + load_float(quantized + arrays.mean);
}

void decode(const Quantization& quantization, const QuantizedArrays& arrays,
            const std::byte* quantized, Elems first, std::span<float> values) {
  const bool nf4 = quantization.format == Quantization::Format::nf4;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Elems at = first + i;
    const float scale = scale_at(arrays, quantized, at / quantization.block());
    const auto code = static_cast<unsigned>(quantized[nf4 ? at / 2 : at]);
    values[i] =
        scale * (nf4 ? nf4_values()[at % 2 == 0 ? code >> 4U : code & 0xfU] : dynamic_map()[code]);
  }
}

}  // namespace ballast::model
