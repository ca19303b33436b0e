#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace ballast::tools {

/// The work of a command.
using Action = std::function<void()>;

/// The things that the values of an option name. Messages, help and completion use it.
enum class Names {
  anything,
  file,
  folder,
  path,        ///< a file or a folder
  model,       ///< a run, a checkpoint, a Hugging Face folder, or a file of one
  new_path,    ///< a file or a folder to write
  new_folder,  ///< a folder to write
  command,
  setting,  ///< KEY=VALUE for a key of the config
  key,      ///< a key of the config
};

/// The placeholder of such values in the help, and how shells complete them. In the calls,
/// {extensions}, {patterns} and {files} stand for what the option takes, {commands} for the words
/// of the program.
struct ValueCompletion {
  Names names;
  const char* placeholder;
  const char* bash;
  const char* zsh;
  const char* fish;
};
const ValueCompletion& completion_of(Names names);

/// Least and greatest value, as numbers of the type that --help names.
using Range = std::variant<std::pair<int, int>, std::pair<std::uint64_t, std::uint64_t>,
                           std::pair<double, double>>;

/// One option, flag or positional argument of a command.
struct OptionInfo {
  // Rules that whoever adds the option chooses.
  bool required = false;
  bool commas = false;           ///< separate the values of a list
  bool single_argument = false;  ///< a list takes one each time the option is given
  bool positive = false;
  std::optional<Range> range = {};
  std::vector<std::string> choices = {};
  std::vector<std::string> values = {};      ///< for completion: the choices, or what else is read
  Names takes = Names::anything;             ///< by default Names::path for paths
  std::vector<std::string> extensions = {};  ///< of files that it takes, ".json"
  std::string value = {};     ///< placeholder in the help, "DIR"; "" for a flag without a value
  std::string needs = {};     ///< another option
  std::string excludes = {};  ///< another option
  bool show_default = false;  ///< the value of the target
  std::string initial = {};   ///< the default that the help shows; "" without one

  // What follows from its name and its target.
  std::vector<std::string> names = {};  ///< "--verbose", "-v"; of a positional one only "CONFIG"
  std::string description = {};
  std::string bounds = {};  ///< "1 to 65535"; "" without any
  bool positional = false;
  bool flag = false;      ///< has no value, or only one that is attached: --NAME=VALUE
  bool many = false;      ///< takes all values that follow
  bool repeated = false;  ///< may be given several times
  /// Takes over the values that were given, one or more. Returns what is wrong with one, or "".
  std::function<std::string(const std::vector<std::string>& values)> set = {};

  /// Whether this is a flag that may have a value.
  [[nodiscard]] bool optional_value() const { return flag && !value.empty(); }
  /// Name in messages: the first long one.
  [[nodiscard]] const std::string& name() const { return names.front(); }
};

/// A command with its options and subcommands. The help, the completion scripts and the man page
/// are made from it.
struct CommandInfo {
  std::string name;
  std::string path;  ///< "ballast bench io"
  std::string description;
  bool needs_command = false;
  Action action = {};
  std::list<OptionInfo> options = {};
  std::list<CommandInfo> commands = {};

  /// The option of this command with the name `word`; nullptr if there is none.
  [[nodiscard]] const OptionInfo* option(const std::string& word) const;
  /// The subcommand called `word`; nullptr if there is none.
  [[nodiscard]] const CommandInfo* command(const std::string& word) const;
  [[nodiscard]] std::vector<std::string> command_names() const;
  /// The positional arguments: "CONFIG", "RUN...".
  [[nodiscard]] std::vector<std::string> arguments() const;
};

/// The help of a command, in lines of at most 80 columns.
std::string help_text(const CommandInfo& command);

/// "KEY", "[KEY]" or "KEY..." of a positional argument.
std::string argument_text(const OptionInfo& option);
/// "-v, --verbose", "--out DIR" or "--resume[=DIR]".
std::string option_text(const OptionInfo& option);
/// The description with choices, bounds and default.
std::string full_description(const OptionInfo& option);

}  // namespace ballast::tools
