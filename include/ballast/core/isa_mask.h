#pragma once

#include "ballast/core/cpu.h"

namespace ballast {

/// Whether kernels for `isa` run here: the CPU supports it, and BALLAST_ISA_MASK (a name; unset or
/// empty: no mask) does not name a slower one. Throws Error(usage) for another value of the mask.
bool may_run(Isa isa);

}  // namespace ballast
