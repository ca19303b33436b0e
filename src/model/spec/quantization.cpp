#include "ballast/model/quantization.h"

namespace ballast::model {

std::string Quantization::description() const {
  if (format == Format::int8) return "int8";
  return double_scales ? "nf4 with scales in 8 bits" : "nf4";
}

QuantizedArrays::QuantizedArrays(const Quantization& quantization, Elems count) : elements(count) {
  const bool nf4 = quantization.format == Quantization::Format::nf4;
  scales_count = (elements + quantization.block() - 1) / quantization.block();
  nested_count = quantization.double_scales ? (scales_count + kNestedBlock - 1) / kNestedBlock : 0;
  scales = round_up(nf4 ? (elements + 1) / 2 : elements, kCacheLine);
  nested = scales + round_up(scales_count * (nested_count > 0 ? 1 : sizeof(float)), kCacheLine);
  mean = nested + round_up(nested_count * sizeof(float), kCacheLine);
  bytes = mean + (nested_count > 0 ? kCacheLine : 0);
}

}  // namespace ballast::model
