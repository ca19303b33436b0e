#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench adam`: the CPU update against a ceiling that moves the same bytes in the same
/// run, for every variant, instruction set, number of threads and size asked for.
void add_bench_adam(CLI::App& bench, Action& action);

}  // namespace ballast::tools
