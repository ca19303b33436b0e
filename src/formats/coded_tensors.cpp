#include "src/formats/coded_tensors.h"

#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "src/formats/bitsandbytes.h"
#include "src/formats/mxfp4.h"
#include "src/formats/safetensors_header.h"

namespace ballast::formats {
namespace {

using text::printable;

[[noreturn]] void refuse(const WeightPlace& place, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}: tensor '{}' {}", place.file->path().string(),
                                               printable(place.tensor->name), what));
}

std::optional<Pairing> pair_mxfp4(const WeightPlace& place, const FindPlace& find) {
  if (place.tensor->dtype != "U8" || !place.tensor->name.ends_with(mxfp4::kCodesSuffix)) return {};
  const std::vector<std::uint64_t>& shape = place.tensor->shape;
  if (shape.size() != 4 || shape.back() != mxfp4::kCodes || place.tensor->elements == 0) {
    refuse(place, fmt::format("has shape {}, but codes of MXFP4 have 4 dimensions, the last of {}",
                              format_shape(shape), mxfp4::kCodes));
  }
  std::string name = place.tensor->name;
  name.resize(name.size() - mxfp4::kCodesSuffix.size());
  const std::string expected = name + std::string(mxfp4::kScalesSuffix);
  const WeightPlace* const scales = find(expected);
  if (scales == nullptr) {
    refuse(place, fmt::format("has codes of MXFP4, but there is no tensor '{}' with their scales",
                              printable(expected)));
  }
  const std::vector<std::uint64_t> of_scales(shape.begin(), shape.end() - 1);
  if (scales->tensor->dtype != place.tensor->dtype || scales->tensor->shape != of_scales) {
    refuse(*scales, fmt::format("is {} {}, but the scales of '{}' are {} {}", scales->tensor->dtype,
                                format_shape(scales->tensor->shape), printable(place.tensor->name),
                                place.tensor->dtype, format_shape(of_scales)));
  }
  const Elems elements = 2 * place.tensor->elements;
  return Pairing{
      .decoded = {.name = name,
                  .dtype = std::string(dtype_name(DType::bf16)),
                  .shape = {shape[0], shape[2] * mxfp4::kBlock, shape[1]},
                  .elements = elements,
                  .bytes = elements * sizeof(Bf16)},
      .coded = {.format = CodedWeights::Format::mxfp4, .codes = place, .scales = *scales},
      .parts = {scales->tensor}};
}

}  // namespace

std::optional<Pairing> find_pairing(const WeightPlace& place, DType others, const FindPlace& find) {
  std::optional<Pairing> found = pair_mxfp4(place, find);
  return found ? std::move(found) : bitsandbytes::pair(place, others, find);
}

ReadAhead::Source stored_range(const WeightPlace& place, Elems first, Elems end) {
  if (place.coded == nullptr) {
    const Bytes width = size_of(type_of(place));
    return {&place, first * width, end * width};
  }
  return bitsandbytes::codes_of(place, first, end);
}

void read_elements(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  const auto read = [ahead](const WeightPlace& from, Bytes begin, HostBytes bytes) {
    if (ahead != nullptr) {
      ahead->read(from, begin, bytes);
    } else {
      read_stored(from, begin, bytes);
    }
  };
  if (place.coded == nullptr) return read(place, first * size_of(type_of(place)), out);
  bitsandbytes::read(place, first, out, read);
}

}  // namespace ballast::formats
