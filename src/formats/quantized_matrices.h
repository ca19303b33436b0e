#pragma once

#include <optional>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/formats/stored_weights.h"

#include "src/formats/pairing.h"
#include "src/formats/read_ahead.h"

// All formats in which files may store quantised weights: mxfp4.h, bitsandbytes.h, fp8.h.

namespace ballast::formats {

/// The tensor that `place` stores in quantised form, or nothing if `place` is not quantised.
/// `others`: the type of weights that are not quantised. Throws Error(data) naming file and tensor
/// if scales or descriptions are missing or do not fit.
std::optional<Pairing> pair_quantized(const WeightPlace& place, DType others,
                                      const FindPlace& find);

/// Whether a tensor with this name has the scales of a matrix, in a type that weights may have.
bool has_scales(const std::string& name);

/// Dequantises elements of a matrix from `first` on into `out`, in the type of the place. `ahead`
/// reads the codes; null: through the page cache. Not for MXFP4, which is read by slices.
void read_quantized(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

}  // namespace ballast::formats
