#pragma once

#include "ballast/core/cpu.h"

namespace ballast {

/// Returns whether kernels for `isa` may run: the CPU supports it, and BALLAST_ISA_MASK (a name;
/// unset or empty: no mask) does not select a slower one. Throws Error(usage) for an invalid mask.
bool may_run(Isa isa);

}  // namespace ballast
