#pragma once

#include <string>
#include <vector>

namespace ballast::tools {

/// Runs the program: reads the command line, does its work, prints results and errors. Returns the
/// exit status. Handles signals from then on (install_signal_handlers()). Call once per process.
/// `name`: the words that start the program, for messages and run.json; empty: argv[0].
int main_program(int argc, char** argv, const std::vector<std::string>& name = {});

}  // namespace ballast::tools
