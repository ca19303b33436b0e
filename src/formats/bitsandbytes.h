#pragma once

#include <optional>

#include "ballast/core/view.h"
#include "ballast/formats/stored_weights.h"
#include "ballast/model/quantization.h"
#include "ballast/model/quantized_values.h"

#include "src/formats/pairing.h"
#include "src/formats/read_ahead.h"

// Matrices that bitsandbytes has quantised, as transformers saves them. Sources: Dettmers et al.,
// "QLoRA", arXiv 2305.14314 (NF4, double quantization) and "LLM.int8()", arXiv 2208.07339; the
// names are those of bitsandbytes' QuantState and Int8Params.
//
// NF4, a matrix NAME: NAME has the codes of the flattened matrix, two in a byte, the first in the
// high half; NAME.absmax the scales of 64 elements each (F32), NAME.quant_map the 16 values.
// If scales are codes, NAME.absmax is U8, NAME.nested_absmax (F32) has their scales,
// NAME.nested_quant_map the 256 values. NAME.quant_state.bitsandbytes__nf4 describes it in JSON.
//
// LLM.int8, a matrix MODULE.weight [rows, columns]: itself in I8; MODULE.SCB [rows], the largest
// magnitude of each row (F32); MODULE.weight_format, 0 for rows one after the other.

namespace ballast::formats::bitsandbytes {

/// The matrix that is stored in quantised form at `place`, or nothing if `place` is not quantised
/// by bitsandbytes.
/// `others`: the type of weights that are not quantised, which matrices in LLM.int8 get. Throws
/// Error(data) naming file and tensor if scales or descriptions are missing or do not fit;
/// Error(io).
std::optional<Pairing> pair(const WeightPlace& place, DType others, const FindPlace& find);

/// Dequantises elements from `first` on into `out`, in the type of the place: code times scale in
/// fp32, rounded once to nearest even, which is what bitsandbytes computes. `ahead` reads the
/// codes; null: through the page cache, which scales always use.
void read(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

/// Whether the matrix at `place` has codes that a model in `wanted` can keep unchanged.
bool has_codes(const WeightPlace& place, const model::Quantization& wanted);
/// Writes the codes and scales of such a matrix to the arrays at `out`. Scales are copied if both
/// formats quantise them, or neither does. Otherwise they are dequantised, which loses nothing, or
/// quantised (model::store_scales()).
void read_codes(const WeightPlace& place, const model::Quantization& wanted, HostBytes out,
                ReadAhead* ahead);

}  // namespace ballast::formats::bitsandbytes
