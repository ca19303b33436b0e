#include "src/formats/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/convert.h"
#include "ballast/text/json.h"

#include "src/formats/safetensors_header.h"

namespace ballast::formats::fp8 {
namespace {

constexpr std::string_view kCodesType = "F8_E4M3";
constexpr float kLargest = 448.0F;

Elems blocks_in(Elems extent) {
  return (extent + kBlock - 1) / kBlock;
}

/// Rows [first, end) of the scales.
std::vector<float> read_scale_rows(const WeightPlace& place, Elems first, Elems end) {
  const WeightPlace& scales = place.quantized->scales;
  const DType type = type_of(scales);
  const Elems columns = scales.tensor->shape.back();
  std::vector<std::byte> stored((end - first) * columns * size_of(type));
  read_stored(scales, first * columns * size_of(type), stored);
  std::vector<float> values((end - first) * columns);
  decode(stored, type, values);
  return values;
}

}  // namespace

float value_of(std::uint8_t code) {
  constexpr int kMantissaBits = 3;
  constexpr int kBias = 7;
  const int exponent = (code >> kMantissaBits) & 15;
  const int mantissa = code & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissaBits)
                              : std::ldexp(static_cast<float>(8 + mantissa),
                                           exponent - kBias - kMantissaBits);
  if (exponent == 15 && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
  return code < 128 ? value : -value;
}

const std::array<float, 256>& values_of_codes() {
  static const auto table = [] {
    std::array<float, 256> values;
    for (std::size_t code = 0; code < values.size(); ++code) {
      values[code] = value_of(static_cast<std::uint8_t>(code));
    }
    return values;
  }();
  return table;
}

std::uint8_t code_of(float value) {
  constexpr float kSmallestNormal = 0x1p-6F;
  constexpr unsigned kDropped = 20;  // bits of an fp32 mantissa that E4M3 does not have
  const std::uint8_t sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return sign | 127U;
  const float size = std::min(std::abs(value), kLargest);
  if (size < kSmallestNormal) {
    return sign | static_cast<std::uint8_t>(std::nearbyint(size * 0x1p9F));
  }
  auto bits = std::bit_cast<std::uint32_t>(size);
  bits += (1U << (kDropped - 1U)) - 1U + (bits >> kDropped & 1U);
  constexpr std::uint32_t kBiases = 127 - 7;  // difference of the exponents' biases
  return sign | static_cast<std::uint8_t>((bits >> kDropped) - (kBiases << 3U));
}

namespace {

float scale_for(float largest, ScaleForm form) {
  float scale = largest / kLargest;
  if (form.powers_of_two) {
    int exponent = 0;
    const float fraction = std::frexp(scale, &exponent);
    scale = std::ldexp(1.0F, fraction == 0.5F ? exponent - 1 : exponent);
  }
  if (form.type == DType::bf16) scale = to_float(to_bf16(scale));
  return scale >= std::numeric_limits<float>::min() ? scale : 1.0F;
}

}  // namespace

float encode(std::span<const float> values, Elems columns, Elems block, ScaleForm form,
             std::span<std::byte> codes) {
  const Elems begin = block * kBlock;
  const Elems end = std::min(columns, begin + kBlock);
  float largest = 0.0F;
  for (Elems row = 0; row < values.size(); row += columns) {
    for (const float value : values.subspan(row + begin, end - begin)) {
      largest = std::max(largest, std::abs(value));
    }
  }
  const float scale = scale_for(largest, form);
  for (Elems row = 0; row < values.size(); row += columns) {
    for (Elems i = row + begin; i < row + end; ++i) {
      codes[i] = static_cast<std::byte>(code_of(values[i] / scale));
    }
  }
  return scale;
}

std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find) {
  const StoredTensor& codes = *place.tensor;
  if (codes.dtype != kCodesType) return {};
  const WeightPlace* const scales = find(codes.name + std::string(kScalesSuffix));
  if (scales == nullptr) return {};
  const bool is_matrix = codes.shape.size() == 2 && codes.elements > 0;
  const std::vector<std::uint64_t> needed =
      is_matrix ? std::vector{blocks_in(codes.shape[0]), blocks_in(codes.shape[1])}
                : std::vector<std::uint64_t>();
  const bool known = weight_type(scales->tensor->dtype).has_value();
  if (!is_matrix || !known || scales->tensor->shape != needed) {
    refuse_tensor(
        *scales,
        fmt::format("is {} {}, but '{}' with shape {} needs F32 or BF16, one for "
                    "each block of {} x {}; give the folder of the original "
                    "model, or load this one with transformers, dequantize() it "
                    "and save it",
                    scales->tensor->dtype, format_shape(scales->tensor->shape),
                    text::printable(codes.name), format_shape(codes.shape), kBlock, kBlock));
  }
  Pairing pairing = {
      .dequantized = codes,
      .quantized = {.format = QuantizedWeights::Format::fp8, .codes = place, .scales = *scales},
      .parts = {scales->tensor}};
  pairing.dequantized.dtype = dtype_name(others);
  pairing.dequantized.bytes = codes.elements * size_of(others);
  return pairing;
}

void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  const std::array<float, 256>& table = values_of_codes();
  const DType type = type_of(place);
  const Elems count = out.size() / size_of(type);
  if (count == 0) return;
  const Elems columns = place.tensor->shape.back();
  const Elems begin = first / columns / kBlock;  // first row of blocks
  const auto scales = read_scale_rows(place, begin, (first + count - 1) / columns / kBlock + 1);
  std::vector<std::byte> codes(count);
  read_stored(place.quantized->codes, first, codes, ahead);
  std::vector<float> values(count);
  for (Elems done = 0; done < count;) {
    const Elems row = (first + done) / columns;
    const Elems column = (first + done) % columns;
    const Elems run = std::min({count - done, columns - column, kBlock - column % kBlock});
    const float scale = scales[(row / kBlock - begin) * blocks_in(columns) + column / kBlock];
    for (Elems i = done; i < done + run; ++i) {
      values[i] = table[std::to_integer<std::size_t>(codes[i])] * scale;
    }
    done += run;
  }
  encode(values, type, out);
}

}  // namespace ballast::formats::fp8
