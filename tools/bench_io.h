#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench io`: swap throughput of one or several paths by pattern, block size, depth and
/// backend, from the command line or a job file.
void add_bench_io(CLI::App& bench, Action& action);

}  // namespace ballast::tools
