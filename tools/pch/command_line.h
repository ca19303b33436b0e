#ifndef BALLAST_PCH_COMMAND_LINE_H
#define BALLAST_PCH_COMMAND_LINE_H

// Precompiled for the program: every subcommand reads its options with CLI11.

#include "src/pch/standard.h"

#include <CLI/CLI.hpp>

#endif
