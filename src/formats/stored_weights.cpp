#include "ballast/formats/stored_weights.h"

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/safetensors_header.h"
#include "src/formats/weight_causes.h"

namespace ballast::formats {

Elems WeightPlace::first_in_whole() const {
  if (stack == nullptr) return 0;
  return (tensor->offset - stack->tensor->offset) / (tensor->bytes / tensor->elements);
}

Bytes stored_bytes(const WeightPlace& place) {
  if (place.quantized == nullptr) return place.tensor->bytes;
  const QuantizedWeights& quantized = *place.quantized;
  Bytes bytes = quantized.codes.tensor->bytes + quantized.scales.tensor->bytes;
  if (quantized.nested.tensor != nullptr) bytes += quantized.nested.tensor->bytes;
  return bytes;
}

void read_stored(const WeightPlace& place, Bytes first, std::span<std::byte> out) {
  text::read_fully(place.file->descriptor(), place.file->path(), place.tensor->offset + first, out);
}

void refuse_tensor(const WeightPlace& place, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}: tensor '{}' {}", place.file->path().string(),
                                               text::printable(place.tensor->name), what));
}

DType type_of(const WeightPlace& place) {
  if (const auto type = weight_type(place.tensor->dtype)) return *type;
  refuse_tensor(place, fmt::format("has dtype {}; weights can be F32, BF16 or F16{}",
                                   place.tensor->dtype, remedy_for_dtype(place.tensor->dtype)));
}

}  // namespace ballast::formats
