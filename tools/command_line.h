#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tools/usage/command_table.h"
#include "tools/usage/words.h"

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

/// The variable that an option sets. Its initial value is the default. Numbers that do not fit it
/// and empty paths are refused.
using Target = std::variant<std::string*, std::filesystem::path*, std::uint32_t*, std::uint64_t*,
                            double*, std::optional<int>*, std::optional<std::uint64_t>*,
                            std::optional<double>*, std::vector<std::string>*, std::vector<int>*,
                            std::vector<std::uint32_t>*, std::vector<double>*>;

/// Refers to the program or one of its subcommands. Valid as long as its CommandLine.
class Command {
 public:
  Command(const CommandLine* line, CommandInfo* info) : line_(line), info_(info) {}

  Command add_command(const std::string& name, const std::string& description);
  /// Requires one of the subcommands to follow.
  void require_command();
  /// Adds an option, or a positional argument if `name` has no dashes. `target` must outlive the
  /// parsing. `rules` sets only the first part of its members.
  void add_option(const std::string& name, Target target, const std::string& description,
                  OptionInfo rules = {});
  /// Adds a flag. `excludes`: an option added before that it may not be combined with, or "".
  void add_flag(const std::string& name, bool* target, const std::string& description,
                const std::string& excludes = "");
  /// Adds a flag that may have a value, given as --NAME=VALUE; `shown` stands for it in --help.
  /// Sets
  /// `target` to the value, or to kFlagAlone.
  void add_flag(const std::string& name, std::string* target, const std::string& description,
                const std::string& shown);
  /// Sets what CommandLine::action() returns if this command is chosen.
  void set_action(const Action& action);

  // Names of the options that a file may set: long ones, without dashes.
  [[nodiscard]] std::vector<std::string> option_names() const;
  [[nodiscard]] bool given(const std::string& name) const;
  /// Sets an option after parsing, with all its checks. Throws Error(usage).
  void set(const std::string& name, const std::vector<std::string>& values);

 private:
  const CommandLine* line_;
  CommandInfo* info_;
};

/// The words after the name of the program.
class CommandLine {
 public:
  CommandLine(const std::string& name, const std::string& description);
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  [[nodiscard]] Command program() { return {this, &table_}; }
  /// Table of the commands and options that have been added.
  [[nodiscard]] const CommandInfo& table() const { return table_; }
  /// Parses the words after the name of the program, which must be normalised(), and sets the
  /// targets of their options. Returns false if help() is asked for. Throws Error(usage), with a
  /// suggestion for unknown commands.
  [[nodiscard]] bool parse(const std::vector<std::string>& words);
  /// The words that were parsed.
  [[nodiscard]] const ReadWords& words() const { return words_; }
  /// Help on the chosen command, or on the program if none is chosen.
  [[nodiscard]] std::string help() const { return help_text(*words_.command); }
  /// Help on a command such as {"bench", "io"}. Throws Error(usage) if it is unknown.
  [[nodiscard]] std::string help(const std::vector<std::string>& command) const;
  /// Whether the subcommand `command` of the program is chosen.
  [[nodiscard]] bool chosen(const std::string& command) const;
  /// Action of the chosen command; empty if there is none.
  [[nodiscard]] const Action& action() const { return words_.command->action; }

 private:
  CommandInfo table_;
  ReadWords words_;
};

}  // namespace ballast::tools
