#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench plan`: predictions against steps.
void add_bench_plan(CLI::App& bench, Action& action);

}  // namespace ballast::tools
