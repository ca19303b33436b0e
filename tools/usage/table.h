#pragma once

#include <list>
#include <string>
#include <vector>

namespace ballast::tools {

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

/// One option, flag or positional argument of a command.
struct OptionInfo {
  std::vector<std::string> names;  ///< "--verbose", "-v"; only "CONFIG" for a positional argument
  std::string value;  ///< placeholder in the help, "DIR"; "" for a flag without a value
  std::string description;
  std::string range = {};    ///< "1 to 65535"; "" without bounds
  std::string initial = {};  ///< default that the help shows; "" without one
  std::vector<std::string> choices = {};
  std::vector<std::string> values = {};      ///< choices for completion, or words that are also
                                             ///< accepted
  std::vector<std::string> extensions = {};  ///< extensions of files that it takes, ".json"
  Names takes = Names::anything;
  bool positional = false;
  bool flag = false;  ///< has no value, or only an attached one: --NAME=VALUE
  bool required = false;
  bool many = false;          ///< takes all values that follow
  bool repeated = false;      ///< may be given several times
  bool commas = false;        ///< a value is a list
  std::string needs = {};     ///< name of another option
  std::string excludes = {};  ///< name of another option

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
