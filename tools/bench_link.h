#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench link`: copies to and from the device by size, as shares of the plainest copies
/// that the machine has.
void add_bench_link(CLI::App& bench, Action& action);

}  // namespace ballast::tools
