#pragma once

#include "src/engine/lanes.h"

namespace ballast::engine {

/// Performs one operation of each kind that computes or communicates, so that the device loads all
/// kernels before the first step. Loading a kernel may wait for all work of a GPU. During a step
/// that work could be a collective that waits for another loading rank. Changes nothing that a step
/// reads. All ranks call it together, before the lanes run. Throws Error.
void warm_up(Lanes& lanes);

}  // namespace ballast::engine
