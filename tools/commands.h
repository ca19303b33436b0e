#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace ballast::tools {

class Command;

/// Each adds a subcommand with its action.
void add_train(Command program);
void add_plan(Command program);
void add_tokenize(Command program);
void add_bench(Command program);
void add_tune(Command program);

// Subcommands of `ballast bench`.
void add_bench_adam(Command bench);
void add_bench_attention(Command bench);
void add_bench_io(Command bench);
void add_bench_link(Command bench);
void add_bench_plan(Command bench);
void add_bench_step(Command bench);

/// `ballast --version`: version, devices, communicators, I/O backends, instruction sets.
void print_version();

/// Set by SIGINT and SIGTERM.
const std::atomic<bool>& interrupted();
/// The first of these signals; 0 before any.
int interrupt_signal();

/// The words of the program's command line, its name included.
const std::vector<std::string>& command_line();

}  // namespace ballast::tools
