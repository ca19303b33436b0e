#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/model/packed_values.h"
#include "ballast/text/json.h"

#include "src/formats/quantized_matrices.h"

namespace ballast::formats::bitsandbytes {
namespace {

using model::Quantization;
using model::QuantizedArrays;
using text::Json;
using text::printable;

constexpr std::string_view kDescription = ".quant_state.bitsandbytes__";
constexpr const char* kOriginal = "give the folder of the original model";
/// Elements with one scale of NF4.
const Elems kBlock = Quantization{}.block();
/// Elements whose scales share a scale.
const Elems kWhole = kBlock * model::kNestedBlock;

Quantization format_of(const QuantizedWeights& quantized) {
  return {.format = Quantization::Format::nf4, .double_scales = quantized.nested.tensor != nullptr};
}

/// A matrix in NF4 whose tensors are to be found and checked.
class Nf4Matrix {
 public:
  Nf4Matrix(const WeightPlace& codes, const WeightPlace& description, const FindPlace& find)
      : codes_(codes), find_(find), description_(description) {
    constexpr Bytes kLongest = 64 * kKiB;
    if (description.tensor->bytes > kLongest) {
      refuse_tensor(description,
                    fmt::format("has {} bytes, too many for the description of a quantised matrix",
                                description.tensor->bytes));
    }
    std::string content(description.tensor->bytes, '\0');
    read_stored(description, 0, std::as_writable_bytes(std::span(content)));
    constexpr std::size_t kDeepest = 4;
    json_ = text::parse_json(content,
                             fmt::format("{}: tensor '{}'", description.file->path().string(),
                                         printable(description.tensor->name)),
                             {.category = ErrorCategory::data, .deepest = kDeepest});
  }

  Pairing pair() {
    const bool nested = find_(name_of(".nested_absmax")) != nullptr;
    expect("quant_type", "nf4");
    expect("blocksize", kBlock);
    if (nested) {
      expect("nested_blocksize", model::kNestedBlock);
      expect("nested_dtype", "float32");
    }
    const StoredTensor dequantized = dequantized_tensor();
    const Elems scales = (dequantized.elements + kBlock - 1) / kBlock;
    QuantizedWeights quantized = {.format = QuantizedWeights::Format::nf4, .codes = codes_};
    if (const Bytes wanted = (dequantized.elements + 1) / 2; codes_.tensor->bytes != wanted) {
      refuse_tensor(codes_,
                    fmt::format("has {} bytes, but a matrix {} has {} in NF4", codes_.tensor->bytes,
                                format_shape(dequantized.shape), wanted));
    }
    quantized.scales = part(".absmax", nested ? "U8" : "F32", scales);
    check_table(".quant_map", model::nf4_values());
    if (nested) {
      const Elems blocks = (scales + model::kNestedBlock - 1) / model::kNestedBlock;
      quantized.nested = part(".nested_absmax", "F32", blocks);
      check_table(".nested_quant_map", model::dynamic_map());
      quantized.mean = mean();
    }
    parts_.push_back(description_.tensor);
    return {dequantized, quantized, parts_};
  }

 private:
  [[nodiscard]] std::string name_of(std::string_view suffix) const {
    return codes_.tensor->name + std::string(suffix);
  }

  [[nodiscard]] const Json& member(std::string_view key) const {
    static const Json kNothing;
    const Json* const found = json_.find(key);
    return found == nullptr ? kNothing : *found;
  }

  void expect(std::string_view key, const Json& wanted) const {
    const Json& found = member(key);
    if (found.type() == wanted.type() && found.text() == wanted.text()) return;
    refuse_tensor(description_, fmt::format("says that {} is {}, but Ballast reads only {}; {}",
                                            key, shown(found), wanted.compact(), kOriginal));
  }

  static std::string shown(const Json& value) {
    constexpr std::size_t kLongest = 60;
    return printable(value.compact(), kLongest);
  }

  [[nodiscard]] StoredTensor dequantized_tensor() const {
    StoredTensor dequantized = {.name = codes_.tensor->name};
    Bytes width = 0;
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      if (!(member("dtype") == config::torch_name(type))) continue;
      dequantized.dtype = dtype_name(type);
      width = size_of(type);
    }
    if (width == 0) {
      refuse_tensor(
          description_,
          fmt::format("says that dtype is {}; weights can be float32, bfloat16 or float16",
                      shown(member("dtype"))));
    }
    const Json& shape = member("shape");
    bool valid = shape.is_array() && shape.elements().size() == 2;
    for (const Json& extent : shape.elements()) {
      dequantized.shape.push_back(extent.is_number() ? extent.whole().value_or(0) : 0);
      valid = valid && dequantized.shape.back() > 0;
    }
    constexpr Elems kMax = Elems{1} << 56U;
    if (!valid || !count_elements(dequantized.shape, dequantized.elements) ||
        dequantized.elements > kMax) {
      refuse_tensor(description_,
                    fmt::format("says that shape is {}, not that of a matrix", shown(shape)));
    }
    dequantized.bytes = dequantized.elements * width;
    return dequantized;
  }

  /// The tensor with this suffix, which must have `elements` elements of type `dtype`.
  WeightPlace part(std::string_view suffix, std::string_view dtype, Elems elements) {
    const WeightPlace* const found = find_(name_of(suffix));
    if (found == nullptr) {
      refuse_tensor(codes_, fmt::format("is a matrix in NF4, but its tensor '{}' is missing",
                                        printable(name_of(suffix))));
    }
    const StoredTensor& tensor = *found->tensor;
    if (tensor.dtype != dtype || tensor.elements != elements) {
      refuse_tensor(*found, fmt::format("is {} {}, but '{}' needs {} [{}]", tensor.dtype,
                                        format_shape(tensor.shape), printable(codes_.tensor->name),
                                        dtype, elements));
    }
    parts_.push_back(found->tensor);
    return *found;
  }

  /// Tables of other versions of PyTorch may be rounded differently.
  template <std::size_t size>
  void check_table(std::string_view suffix, const std::array<float, size>& wanted) {
    constexpr float kRounding = 1e-6F;
    const WeightPlace place = part(suffix, "F32", size);
    std::array<float, size> found;
    read_stored(place, 0, std::as_writable_bytes(std::span(found)));
    const bool equal = std::equal(found.begin(), found.end(), wanted.begin(),
                                  [](float a, float b) { return std::fabs(a - b) <= kRounding; });
    if (!equal) {
      refuse_tensor(
          place,
          fmt::format("differs from the table of values that bitsandbytes uses; {}", kOriginal));
    }
  }

  [[nodiscard]] float mean() const {
    const Json& offset = member("nested_offset");
    const auto value = offset.is_number() ? static_cast<float>(offset.number()) : NAN;
    if (!std::isfinite(value)) {
      refuse_tensor(description_, fmt::format("says that nested_offset is {}, not a number of fp32",
                                              shown(offset)));
    }
    return value;
  }

  const WeightPlace& codes_;
  const FindPlace& find_;
  const WeightPlace& description_;
  Json json_;
  std::vector<const StoredTensor*> parts_;
};

/// Finds the parts of a matrix in LLM.int8.
std::optional<Pairing> pair_int8(const WeightPlace& place, DType type, const FindPlace& find) {
  const StoredTensor& codes = *place.tensor;
  constexpr std::string_view kSuffix = "weight";
  if (codes.dtype != "I8" || !codes.name.ends_with("." + std::string(kSuffix))) return {};
  const std::string module = codes.name.substr(0, codes.name.size() - kSuffix.size());
  const WeightPlace* const scales = find(module + "SCB");
  if (scales == nullptr) {
    refuse_tensor(place,
                  fmt::format("is a matrix in int8, but tensor '{}' with its scales is missing; {}",
                              printable(module + "SCB"), kOriginal));
  }
  if (codes.shape.size() != 2 || codes.elements == 0 || scales->tensor->dtype != "F32" ||
      scales->tensor->elements != codes.shape.front()) {
    refuse_tensor(
        *scales,
        fmt::format("is {} {}, but '{}' with shape {} needs F32 of one element for each row",
                    scales->tensor->dtype, format_shape(scales->tensor->shape),
                    printable(codes.name), format_shape(codes.shape)));
  }
  Pairing pairing = {
      .dequantized = codes,
      .quantized = {.format = QuantizedWeights::Format::int8, .codes = place, .scales = *scales},
      .parts = {scales->tensor}};
  pairing.dequantized.dtype = dtype_name(type);
  pairing.dequantized.bytes = codes.elements * size_of(type);
  if (const WeightPlace* const order = find(module + "weight_format")) {
    std::byte rows = {};
    if (order->tensor->bytes == 1) read_stored(*order, 0, {&rows, 1});
    if (order->tensor->bytes != 1 || rows != std::byte{0}) {
      refuse_tensor(*order,
                    fmt::format("is not 0: the rows of '{}' are not one after the other; {}",
                                printable(codes.name), kOriginal));
    }
    pairing.parts.push_back(order->tensor);
  }
  return pairing;
}

/// Reads the scales of elements [first, end) of a matrix into the arrays of a part of it that
/// begins with element `begin`, a multiple of kWhole.
void read_scales(const QuantizedWeights& quantized, Elems begin, Elems first, Elems end,
                 const QuantizedArrays& arrays, std::byte* to) {
  const bool nested = arrays.nested_count > 0;
  const Bytes width = nested ? 1 : sizeof(float);
  const Elems from = first / kBlock;
  const Elems count = (end + kBlock - 1) / kBlock - from;
  read_stored(quantized.scales, from * width,
              {to + arrays.scales + (from - begin / kBlock) * width, count * width});
  if (!nested) return;
  read_stored(quantized.nested, begin / kWhole * sizeof(float),
              {to + arrays.nested, arrays.nested_count * sizeof(float)});
  std::memcpy(to + arrays.mean, &quantized.mean, sizeof quantized.mean);
}

void decode_nf4(const WeightPlace& place, Elems first, std::span<float> values, ReadAhead* ahead) {
  const QuantizedWeights& quantized = *place.quantized;
  const Quantization how = format_of(quantized);
  const Elems begin = first / kWhole * kWhole;
  const Elems end = first + values.size();
  const QuantizedArrays arrays(how, end - begin);
  thread_local std::vector<std::byte> memory;  // shared by all of this thread's many calls
  memory.resize(std::max<std::size_t>(memory.size(), arrays.bytes));
  read_stored(quantized.codes, first / 2,
              {memory.data() + (first - begin) / 2, (end + 1) / 2 - first / 2}, ahead);
  read_scales(quantized, begin, first, end, arrays, memory.data());
  model::decode(how, arrays, memory.data(), first - begin, values);
}

/// Dequantises like bitsandbytes: multiplies by the magnitude of the row, then by 1 / 127.
void decode_int8(const WeightPlace& place, Elems first, std::span<float> values, ReadAhead* ahead) {
  const QuantizedWeights& quantized = *place.quantized;
  const Elems columns = place.tensor->shape.back();
  const Elems row = first / columns;
  std::vector<float> scales((first + values.size() - 1) / columns - row + 1);
  std::vector<std::int8_t> codes(values.size());
  read_stored(quantized.scales, row * sizeof(float), std::as_writable_bytes(std::span(scales)));
  read_stored(quantized.codes, first, std::as_writable_bytes(std::span(codes)), ahead);
  for (std::size_t i = 0; i < values.size(); ++i) {
    constexpr float kLargest = 127.0F;
    values[i] = static_cast<float>(codes[i]) * scales[(first + i) / columns - row];
    values[i] *= 1.0F / kLargest;
  }
}

}  // namespace

std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find) {
  const std::string described = place.tensor->name + std::string(kDescription);
  if (const WeightPlace* const found = find(described + "nf4")) {
    return Nf4Matrix(place, *found, find).pair();
  }
  if (find(described + "fp4") != nullptr) {
    refuse_tensor(place,
                  fmt::format("is a matrix in FP4, but Ballast reads only NF4; {}", kOriginal));
  }
  if (find(place.tensor->name + ".absmax") != nullptr) {
    refuse_tensor(place,
                  fmt::format("is quantised by bitsandbytes, but its tensor '{}nf4' is missing",
                              printable(described)));
  }
  return pair_int8(place, others, find);
}

void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  const DType type = type_of(place);
  thread_local std::vector<float> memory;
  memory.resize(std::max<std::size_t>(memory.size(), out.size() / size_of(type)));
  const auto values = std::span(memory).first(out.size() / size_of(type));
  if (values.empty()) return;
  if (place.quantized->format == QuantizedWeights::Format::int8) {
    decode_int8(place, first, values, ahead);
  } else {
    decode_nf4(place, first, values, ahead);
  }
  encode(values, type, out);
}

bool has_codes(const WeightPlace& place, const Quantization& wanted) {
  return place.quantized != nullptr && place.quantized->format == QuantizedWeights::Format::nf4 &&
         wanted.format == Quantization::Format::nf4;
}

void read_codes(const WeightPlace& place, const Quantization& wanted, HostBytes out,
                ReadAhead* ahead) {
  const QuantizedWeights& quantized = *place.quantized;
  const Quantization stored = format_of(quantized);
  const Elems elements = place.tensor->elements;
  const QuantizedArrays arrays(wanted, elements);
  read_stored(quantized.codes, 0, out.first(quantized.codes.tensor->bytes), ahead);
  if (stored == wanted) return read_scales(quantized, 0, 0, elements, arrays, out.data());
  std::vector<float> scales(arrays.scales_count);
  std::vector<std::byte> memory;
  for (Elems begin = 0; begin < elements; begin += kWhole) {
    const Elems end = std::min(begin + kWhole, elements);
    const QuantizedArrays part(stored, end - begin);
    memory.resize(part.bytes);
    read_scales(quantized, begin, begin, end, part, memory.data());
    for (Elems i = 0; i < part.scales_count; ++i) {
      scales[begin / kBlock + i] = model::scale_at(part, memory.data(), i);
    }
  }
  model::store_scales(arrays, scales, out.data());
}

}  // namespace ballast::formats::bitsandbytes
