#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tools/usage/table.h"

namespace CLI {
class App;
}

namespace ballast::tools {

/// The work of a command.
using Action = std::function<void()>;

/// The variable that an option sets. Its initial value is the default. Numbers that do not fit it
/// and empty paths are refused.
using Target = std::variant<std::string*, std::filesystem::path*, std::uint32_t*, std::uint64_t*,
                            double*, std::optional<int>*, std::optional<std::uint64_t>*,
                            std::optional<double>*, std::vector<std::string>*, std::vector<int>*,
                            std::vector<std::uint32_t>*, std::vector<double>*>;

/// Least and greatest value, as numbers of the type that --help names.
using Range = std::variant<std::pair<int, int>, std::pair<std::uint64_t, std::uint64_t>,
                           std::pair<double, double>>;

/// Rules of an option in addition to its type.
struct OptionRules {
  bool required = false;
  bool commas = false;           ///< commas separate the values of a list
  bool single_argument = false;  ///< a list takes one value each time the option is given
  bool positive = false;
  std::optional<Range> range = {};
  std::vector<std::string> choices = {};
  std::vector<std::string> values = {};      ///< for completion; the command checks them
  Names takes = Names::anything;             ///< by default Names::path for paths
  std::vector<std::string> extensions = {};  ///< extensions of the files that it takes: ".json"
  const char* value = nullptr;               ///< placeholder of the value in the help
  const char* needs = nullptr;               ///< an option added before
  bool show_default = false;
  const char* shown_default = nullptr;  ///< text shown instead of the default value
};

/// Value of a flag that may have a value but is given without one.
inline constexpr const char* kFlagAlone = "true";

/// Refers to the program or one of its subcommands. Valid as long as its CommandLine.
class Command {
 public:
  Command(CLI::App* app, Action* chosen, CommandInfo* info)
      : app_(app), chosen_(chosen), info_(info) {}

  Command add_command(const std::string& name, const std::string& description);
  /// Requires one of the subcommands to follow.
  void require_command();
  /// Adds an option, or a positional argument if `name` has no dashes. `target` must outlive the
  /// parsing.
  void add_option(const std::string& name, Target target, const std::string& description,
                  const OptionRules& rules = {});
  /// `excludes`: an option added before, or "".
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
  CLI::App* app_;
  Action* chosen_;
  CommandInfo* info_;
};

/// The words after the name of the program, read by CLI11.
class CommandLine {
 public:
  CommandLine(const std::string& name, const std::string& description);
  ~CommandLine();

  [[nodiscard]] Command program();
  /// Table of the commands and options that have been added.
  [[nodiscard]] const CommandInfo& table() const { return table_; }
  /// Parses the words after the name of the program, which must be normalised(). Returns false if
  /// help() is asked for. Throws Error(usage), with a suggestion for unknown commands.
  [[nodiscard]] bool parse(std::vector<std::string> words);
  /// Help on the chosen command, or on the program if none is chosen.
  [[nodiscard]] std::string help() const;
  /// Help on a command such as {"bench", "io"}. Throws Error(usage) if it is unknown.
  [[nodiscard]] std::string help(const std::vector<std::string>& command) const;
  /// Whether the subcommand `command` of the program is chosen.
  [[nodiscard]] bool chosen(const std::string& command) const;
  /// Action of the chosen command; empty if there is none.
  [[nodiscard]] const Action& action() const { return action_; }

 private:
  std::unique_ptr<CLI::App> app_;
  CommandInfo table_;
  Action action_;
};

/// An entry of an INI or TOML file.
struct Setting {
  std::vector<std::string> sections;
  std::string name;
  std::vector<std::string> values;
};

std::vector<Setting> read_settings(std::istream& input);

}  // namespace ballast::tools
