#pragma once

#include "src/engine/step.h"

namespace ballast::engine {

/// Performs one operation of each kind that computes or communicates, one after the other, for
/// devices that load kernels when they are first wanted: loading one may wait for all work of a
/// GPU, a collective too that waits for a rank which is loading itself. Here it waits for nobody,
/// and what is missing shows before the first step. Changes nothing that a step reads. Before the
/// lanes begin; all ranks together. Throws Error.
void warm_up(Lanes& lanes);

}  // namespace ballast::engine
