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

/// The action of a command.
using Action = std::function<void()>;

/// Kinds of values of options. Messages, help and completion use them.
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

/// The placeholder of such values in the help, and the calls that complete them in shells. In the
/// calls, {extensions}, {patterns} and {files} are replaced by those of the option, {commands} by
/// the words of the program.
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
  // Rules that the caller chooses when it adds the option.
  bool required = false;
  bool commas = false;           ///< commas separate the values of a list
  bool single_argument = false;  ///< a list takes one value each time the option is given
  bool positive = false;
  std::optional<Range> range = {};
  std::vector<std::string> choices = {};
  std::vector<std::string> values = {};      ///< choices for completion, or words that are also
                                             ///< accepted
  Names takes = Names::anything;             ///< kind of its values; by default Names::path for
                                             ///< paths
  std::vector<std::string> extensions = {};  ///< extensions of files that it takes, ".json"
  std::string value = {};     ///< placeholder in the help, "DIR"; "" for a flag without a value
  std::string needs = {};     ///< name of another option
  std::string excludes = {};  ///< name of another option
  bool show_default = false;  ///< show the value of the target as the default
  std::string initial = {};   ///< default that the help shows; "" without one

  // Members that follow from its name and its target.
  std::vector<std::string> names = {};  ///< "--verbose", "-v"; only "CONFIG" for a positional
                                        ///< argument
  std::string description = {};
  std::string bounds = {};  ///< "1 to 65535"; "" without bounds
  bool positional = false;
  bool flag = false;      ///< has no value, or only an attached one: --NAME=VALUE
  bool many = false;      ///< takes all values that follow
  bool repeated = false;  ///< may be given several times
  /// Sets the target to the given values, one or more. Returns a description of a mistake in one of
  /// them, or "".
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
