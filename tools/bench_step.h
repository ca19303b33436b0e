#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench step`: training steps of a model with everything in memory, against the
/// matrix-multiply peak of the same run.
void add_bench_step(CLI::App& bench, Action& action);

}  // namespace ballast::tools
