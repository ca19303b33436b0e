#ifndef BALLAST_PCH_COMMAND_LINE_H
#define BALLAST_PCH_COMMAND_LINE_H

// Precompiled for the program: every subcommand reads its options with CLI11.

#include <CLI/CLI.hpp>

#include "src/pch/standard.h"

#endif
