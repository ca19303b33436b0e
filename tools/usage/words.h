#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/usage/table.h"

namespace ballast::tools {

/// Value of a flag that may have one, but has none.
inline constexpr const char* kFlagAlone = "true";

/// The value of a flag as a word: true, off, 1; nothing for other words.
std::optional<bool> flag_value(const std::string& word);

/// A command line as the table of commands reads it. Nothing is checked.
struct ReadWords {
  struct Given {
    const OptionInfo* option = nullptr;
    std::string name;                 ///< name as written, "-v"
    std::vector<std::string> values;  ///< values, attached or taken from the following words
    bool attached = false;            ///< --NAME=VALUE
    std::size_t at = 0;               ///< index of the word
  };

  const CommandInfo* command = nullptr;  ///< the chosen command
  std::string unknown_command;           ///< a word given as a command
  bool has_unknown_command = false;
  std::vector<Given> options;
  std::vector<std::string> arguments;  ///< positional ones
  std::vector<std::string> unknown;    ///< words that look like options but are not

  /// The values given for an option, a flag or a positional argument of the command; empty if it is
  /// not given. That of a flag without a value is kFlagAlone.
  [[nodiscard]] std::vector<std::string> values_of(const OptionInfo& option) const;
  /// The last positional arguments that the command does not take.
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

/// One line about the first mistake in the words, without the values of options; "" if there is
/// none or it is one of a value.
std::string mistake_in(const CommandInfo& program, const ReadWords& read);

}  // namespace ballast::tools
