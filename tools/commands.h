#pragma once

namespace ballast::tools {

class Command;
class CommandLine;

/// Each adds a subcommand with its action.
void add_train(Command program);
void add_plan(Command program);
void add_eval(Command program);
void add_export(Command program);
void add_inspect(Command program);
void add_report(Command program);
void add_tokenize(Command program);
void add_bench(Command program);
void add_doctor(Command program);
void add_tune(Command program);
// Commands about the program itself. They act on its table of commands, which is complete by then.
void add_help(Command program, const CommandLine& line);
void add_completion(Command program, const CommandLine& line);
void add_man(Command program, const CommandLine& line);
void add_config_keys(Command program);

// Subcommands of `ballast bench`.
void add_bench_adam(Command bench);
void add_bench_attention(Command bench);
void add_bench_io(Command bench);
void add_bench_link(Command bench);
void add_bench_plan(Command bench);
void add_bench_step(Command bench);

/// Prints `ballast --version`: version, devices, communicators and libraries with their files or
/// why they are missing, I/O backends, instruction sets.
void print_version();

}  // namespace ballast::tools
