#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/usage/command_table.h"

namespace ballast::tools {

/// Value of a flag that may have a value but is given without one.
inline constexpr const char* kFlagAlone = "true";

/// Converts the value of a flag (true, off, 1) to bool; empty for other words.
std::optional<bool> flag_value(const std::string& word);

/// A command line, split according to the table of commands. Nothing is checked.
struct ReadWords {
  struct GivenOption {
    const OptionInfo* option = nullptr;
    std::string name;                 ///< name as written, "-v"
    std::vector<std::string> values;  ///< values, attached or taken from the following words
    bool attached = false;            ///< --NAME=VALUE
    std::size_t at = 0;               ///< index of the word
  };

  const CommandInfo* command = nullptr;  ///< the chosen command
  std::string unknown_command;           ///< a word given as a command
  bool has_unknown_command = false;
  std::vector<GivenOption> options;
  std::vector<std::string> arguments;  ///< positional arguments
  std::vector<std::string> unknown;    ///< words that look like options but are not

  /// The values given for an option, a flag or a positional argument of the command; empty if it is
  /// not given. A flag without a value has kFlagAlone.
  [[nodiscard]] std::vector<std::string> values_of(const OptionInfo& option) const;
  /// Number of positional arguments at the end that the command does not take.
  [[nodiscard]] std::size_t excess() const;
};

/// Reads words after the program's name.
ReadWords read_words(const CommandInfo& program, const std::vector<std::string>& words);

/// Whether --help is among the options.
bool asks_for_help(const ReadWords& read);

/// Converts the words to the form that the parser expects: `--resume DIR` becomes `--resume=DIR` if
/// DIR would be one argument too many otherwise.
std::vector<std::string> normalised(const CommandInfo& program,
                                    const std::vector<std::string>& words);

/// One line about the first mistake in the words, except in the values of options; "" if there is
/// none.
std::string mistake_in(const CommandInfo& program, const ReadWords& read);

/// Advice on words that other programs would understand. Each function returns "" if it has none.

/// For a word given as a command: "; to evaluate a model: ballast eval".
std::string command_hint(const std::string& word);

/// For an option that `command` lacks, by name without its value: an option of DeepSpeed's or
/// torch's launchers, a key of the config, or an option of another command of `program`.
std::string option_hint(const CommandInfo& program, const CommandInfo& command,
                        const std::string& name);

/// Describes a mistake in a path of the command line. One that is read does not exist, or is a
/// folder instead of a file or the reverse. The folder of one that is written is a file. Returns ""
/// if there is none, for globs, and if `takes` is not a path. Files with other content are refused
/// by their readers.
std::string path_mistake(Names takes, const std::string& path);

}  // namespace ballast::tools
