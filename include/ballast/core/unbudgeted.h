#pragma once

#include "ballast/core/units.h"

namespace ballast {

// Host memory of a run in addition to its budgets, whose ledger lists all buffers of steps.

/// Program, libraries and one thread of the host device, without CUDA, as measured (resident).
inline constexpr Bytes kProgramMemory = 25 * kMiB;
/// More than that for a rank of several: the MPI library.
inline constexpr Bytes kMpiMemory = 8 * kMiB;
/// Buffers of files that are written behind, for checkpoints and saved weights.
inline constexpr Bytes kWriteBuffers = 64 * kMiB;

}  // namespace ballast
