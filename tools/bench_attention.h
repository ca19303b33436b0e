#pragma once

#include "tools/commands.h"

namespace ballast::tools {

/// `ballast bench attention`: our own kernels for attention on the CUDA device beside cuDNN's.
void add_bench_attention(CLI::App& bench, Action& action);

}  // namespace ballast::tools
