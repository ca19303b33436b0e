#include "src/formats/quantized_matrices.h"

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

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/json.h"

namespace ballast::formats {

std::optional<Pairing> pair_quantized(const WeightPlace& place, DType others,
                                      const FindPlace& find) {
  if (auto pairing = mxfp4::pair(place, find)) return pairing;
  if (auto pairing = fp8::pair(place, others, find)) return pairing;
  return bitsandbytes::pair(place, others, find);
}

bool has_scales(const std::string& name) {
  return fp8::is_scales_name(name);
}

void read_quantized(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  using Format = QuantizedWeights::Format;
  const Format format = place.quantized->format;
  expects(format != Format::mxfp4, "matrices in MXFP4 are read in slices");
  if (format == Format::fp8) return fp8::read(place, first, out, ahead);
  bitsandbytes::read(place, first, out, ahead);
}

}  // namespace ballast::formats

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

namespace ballast::formats::fp8 {

namespace {

constexpr std::string_view kCodesType = "F8_E4M3";
constexpr float kLargest = 448.0F;

Elems blocks_in(Elems extent) {
  return (extent + kBlock - 1) / kBlock;
}

constexpr std::array<std::string_view, 2> kScaleSuffixes = {"_scale_inv", "_scale"};

/// Scales [first, end).
std::vector<float> read_scales(const WeightPlace& place, Elems first, Elems end) {
  const WeightPlace& scales = place.quantized->scales;
  const DType type = type_of(scales);
  std::vector<std::byte> stored((end - first) * size_of(type));
  read_stored(scales, first * size_of(type), stored);
  std::vector<float> values(end - first);
  decode(stored, type, values);
  return values;
}

/// Extent of `parts` equal blocks, or of 128 if that makes `parts` blocks; 0 if none fits.
Elems block_extent(Elems extent, Elems parts) {
  if (parts == blocks_in(extent)) return kBlock;
  return parts > 0 && extent % parts == 0 ? extent / parts : 0;
}

/// Whether the scales are those of blocks of 128 x 128. One scale for a small matrix may be either;
/// in a stack it is the matrix's.
bool are_of_blocks(const ScaleGrid& grid, const std::vector<std::uint64_t>& scales) {
  const bool stacked = scales.size() == 3;
  if (stacked && scales[1] * scales[2] == 1) return false;
  return scales.size() >= 2 && scales[scales.size() - 2] == blocks_in(grid.rows) &&
         scales.back() == blocks_in(grid.columns);
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

Elems ScaleGrid::scale_of(Elems row, Elems column) const {
  const Elems in_row = (columns + block_columns - 1) / block_columns;
  return row / rows * per_matrix + row % rows / block_rows * in_row + column / block_columns;
}

std::optional<ScaleGrid> grid_of(const std::vector<std::uint64_t>& codes,
                                 const std::vector<std::uint64_t>& scales) {
  if (codes.size() != 2 && codes.size() != 3) return {};
  if (std::ranges::find(codes, 0U) != codes.end()) return {};
  const Elems rows = codes[codes.size() - 2];
  const Elems columns = codes.back();
  const ScaleGrid one = {rows, columns, rows, columns, 0};
  const bool single = std::ranges::all_of(scales, [](std::uint64_t extent) { return extent == 1; });
  if (single) return one;
  std::vector<std::uint64_t> of_matrix = scales;
  if (codes.size() == 3) {
    if (scales.front() != codes.front()) return {};
    of_matrix.erase(of_matrix.begin());
  }
  of_matrix.resize(std::max<std::size_t>(of_matrix.size(), 2), 1);
  if (of_matrix.size() > 2) return {};
  const Elems block_rows = block_extent(rows, of_matrix[0]);
  const Elems block_columns = block_extent(columns, of_matrix[1]);
  if (block_rows == 0 || block_columns == 0) return {};
  return ScaleGrid{rows, columns, block_rows, block_columns, of_matrix[0] * of_matrix[1]};
}

bool is_scales_name(std::string_view name) {
  return std::ranges::any_of(kScaleSuffixes,
                             [&](std::string_view suffix) { return name.ends_with(suffix); });
}

std::string scaled_by(std::string_view name) {
  for (const std::string_view kind : {"activation_scale", "input_scale"}) {
    if (!name.ends_with(kind) || name.size() <= kind.size()) continue;
    const std::string_view before = name.substr(0, name.size() - kind.size() - 1);
    const char between = name[before.size()];
    if (between == '.') return std::string(before) + ".weight";
    if (between == '_') return std::string(before);  // of a stack
  }
  return "";
}

std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find) {
  const StoredTensor& codes = *place.tensor;
  if (codes.dtype != kCodesType) return {};
  const WeightPlace* scales = nullptr;
  for (const std::string_view suffix : kScaleSuffixes) {
    if (scales == nullptr) scales = find(codes.name + std::string(suffix));
  }
  if (scales == nullptr) return {};
  const bool known = weight_type(scales->tensor->dtype).has_value();
  const std::optional<ScaleGrid> grid = grid_of(codes.shape, scales->tensor->shape);
  if (!known || !grid) {
    refuse_tensor(
        *scales,
        fmt::format(
            "is {} {}, but '{}' with shape {} needs F32 or BF16, one for each block of {} x "
            "{}, for each row or for each matrix; give the folder of the original model, "
            "or load this one with transformers, dequantize() it and save it",
            scales->tensor->dtype, format_shape(scales->tensor->shape), text::printable(codes.name),
            format_shape(codes.shape), kBlock, kBlock));
  }
  Pairing pairing = {
      .dequantized = codes,
      .quantized = {.format = QuantizedWeights::Format::fp8, .codes = place, .scales = *scales},
      .parts = {scales->tensor}};
  const DType type = are_of_blocks(*grid, scales->tensor->shape) ? others : DType::f32;
  pairing.quantized.plain_type = dtype_name(others);
  pairing.dequantized.dtype = dtype_name(type);
  pairing.dequantized.bytes = codes.elements * size_of(type);
  return pairing;
}

void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  const std::array<float, 256>& table = values_of_codes();
  const DType type = type_of(place);
  const Elems count = out.size() / size_of(type);
  if (count == 0) return;
  const ScaleGrid grid = *grid_of(place.tensor->shape, place.quantized->scales.tensor->shape);
  const Elems columns = grid.columns;
  const Elems begin = grid.scale_of(first / columns, 0);
  const auto scales =
      read_scales(place, begin, grid.scale_of((first + count - 1) / columns, columns - 1) + 1);
  std::vector<std::byte> codes(count);
  read_stored(place.quantized->codes, first, codes, ahead);
  std::vector<float> values(count);
  for (Elems done = 0; done < count;) {
    const Elems row = (first + done) / columns;
    const Elems column = (first + done) % columns;
    const Elems run = std::min(
        {count - done, columns - column, grid.block_columns - column % grid.block_columns});
    const float scale = scales[grid.scale_of(row, column) - begin];
    for (Elems i = done; i < done + run; ++i) {
      values[i] = table[std::to_integer<std::size_t>(codes[i])] * scale;
    }
    done += run;
  }
  encode(values, type, out);
}

}  // namespace ballast::formats::fp8
