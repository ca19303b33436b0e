#pragma once

// Precompiled for the program: every subcommand reads its options with CLI11.

#include "src/pch/standard.h"

#include <CLI/CLI.hpp>
