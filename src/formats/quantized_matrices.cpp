#include "src/formats/quantized_matrices.h"

#include "ballast/core/error.h"

#include "src/formats/bitsandbytes.h"
#include "src/formats/fp8.h"
#include "src/formats/mxfp4.h"

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
