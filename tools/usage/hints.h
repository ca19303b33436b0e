#pragma once

#include <string>

#include "tools/usage/table.h"

namespace ballast::tools {

/// Advice on words that other programs would understand. Each function returns "" if it has none.

/// For a word given as a command: "; to evaluate a model: ballast eval".
std::string command_hint(const std::string& word);

/// For an option that `command` lacks, by name without its value: an option of DeepSpeed's or
/// torch's launchers, a key of the config, or an option of another command of `program`.
std::string option_hint(const CommandInfo& program, const CommandInfo& command,
                        const std::string& name);

}  // namespace ballast::tools
