#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/key_effects.h"

#include "tools/usage/command_table.h"

namespace ballast::tools {

// Scripts that complete the words of the program in a shell, from the tables of commands and of the
// config's keys. They work without running the program.

std::string bash_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys);
std::string zsh_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys);
std::string fish_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys);

/// The manual page, for man(7). `version` is that of the program.
std::string man_page(const CommandInfo& program, const std::vector<config::KeyInfo>& keys,
                     const std::string& version);

/// The `call` of a ValueCompletion, filled in with the words of the option and of the program.
std::string completed(const char* call, const OptionInfo& option, const CommandInfo& program);

/// The first part of a description, for a line next to a word.
std::string short_description(const std::string& description);

/// `text` in single quotes of a POSIX shell.
std::string shell_quoted(const std::string& text);

/// The program's command and all its subcommands, recursively.
std::vector<const CommandInfo*> all_commands(const CommandInfo& program);

/// Shell patterns for all subcommands: 'ballast train'|'ballast bench io'|...
std::string command_patterns(const CommandInfo& program, const std::string& separator);

/// A documented key, as text without Markdown.
struct KeyPage {
  std::string path;  ///< "optimizer.params.lr"
  std::string meaning;
  std::string initial;  ///< the default, or where it comes from; may be ""
  std::string range;    ///< accepted values; may be ""
};

/// All documented keys, in the order of a printed config.
std::vector<KeyPage> key_pages();

/// Returns the rows of a table of keys in configs/keys.md, in Markdown: those of the keys in each
/// of `sections`, in that order. "top" are the keys in no section.
std::string key_table(const std::vector<std::string>& sections);

/// Returns the page of `ballast config-keys`: path, meaning, default and range of the keys that
/// have all of `words` in their paths or, if there is no such key, in their descriptions. Case does
/// not matter. Lines have at most `width` columns. Throws Error(usage) if no key matches.
std::string config_keys_page(const std::vector<std::string>& words, std::size_t width);

}  // namespace ballast::tools
