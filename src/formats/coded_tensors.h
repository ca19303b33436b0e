#pragma once

#include <optional>

#include "ballast/core/view.h"
#include "ballast/formats/stored_weights.h"

#include "src/formats/pairing.h"
#include "src/formats/read_ahead.h"

namespace ballast::formats {

/// What the tensor at `place` is the codes of; none if it is not codes. `others`: the type of
/// weights that are not, which matrices of LLM.int8 get, too. Throws Error(data) naming file and
/// tensor if scales or descriptions are missing or do not fit; Error(io).
std::optional<Pairing> find_pairing(const WeightPlace& place, DType others, const FindPlace& find);

/// What of the files elements [first, end) of a tensor are read from, other than scales: its values
/// or its codes. Not for MXFP4, which is read by slices (StoredSlice).
ReadAhead::Source stored_range(const WeightPlace& place, Elems first, Elems end);

/// Fills `out` with elements from `first` on, in the type of the place. `ahead`: what reads values
/// and codes; null: the page cache, which scales come from in any case. Not for MXFP4.
void read_elements(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

}  // namespace ballast::formats
