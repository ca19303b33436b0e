#include <CLI/CLI.hpp>

#include "tools/commands.h"
#include "tools/tune_io.h"

namespace ballast::tools {

void add_tune(CLI::App& app, Action& action) {
  CLI::App* tune = app.add_subcommand("tune", "Find settings that suit this machine");
  tune->require_subcommand(1);
  add_tune_io(*tune, action);
}

}  // namespace ballast::tools
