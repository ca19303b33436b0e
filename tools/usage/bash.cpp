#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/usage/completion.h"

namespace ballast::tools {
namespace {

/// Shell functions that do not depend on the tables. `current` is the word before the cursor;
/// "reply" lists its completions.
constexpr const char* kBashFunctions = R"(
# Offers words that begin with the current one.
_ballast_words() {
  local word
  while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$1" -- "$current")
}

# Offers folders, and files with one of the extensions, or all files if no file has one.
_ballast_files() {
  local file extension found=
  compopt -o filenames 2>/dev/null
  while IFS= read -r file; do
    if [[ -d $file ]]; then COMPREPLY+=("$file"); continue; fi
    for extension in "$@"; do
      [[ $file == *"$extension" ]] && COMPREPLY+=("$file") && found=yes
    done
  done < <(compgen -f -- "$current")
  [[ $found ]] && return
  while IFS= read -r file; do
    [[ -d $file ]] || COMPREPLY+=("$file")
  done < <(compgen -f -- "$current")
}

_ballast_folders() {
  local folder
  compopt -o filenames 2>/dev/null
  while IFS= read -r folder; do COMPREPLY+=("$folder"); done < <(compgen -d -- "$current")
}

# Values of a list with commas.
_ballast_list() {
  local before=
  [[ $current == *,* ]] && before=${current%,*},
  current=${current##*,}
  _ballast_words "$1"
  COMPREPLY=("${COMPREPLY[@]/#/$before}")
}

# KEY=VALUE for a key of the config.
_ballast_setting() {
  local key=${current%%=*}
  if [[ $current != *=* ]]; then
    compopt -o nospace 2>/dev/null
    _ballast_words "$_ballast_keys"
    COMPREPLY=("${COMPREPLY[@]/%/=}")
    return
  fi
  prefix+=$key=
  current=${current#*=}
  _ballast_value "$key"
}
)";

constexpr const char* kBashMain = R"(
_ballast() {
  local line=${COMP_LINE:0:COMP_POINT} words current previous word at=ballast prefix=
  read -r -a words <<< "$line"
  [[ $line == *[[:space:]] ]] && words+=('')
  current=${words[${#words[@]} - 1]#[\"\']}
  previous=${words[${#words[@]} - 2]}
  COMPREPLY=()
  for word in "${words[@]:1:${#words[@]} - 2}"; do
    case "$at $word" in
      @COMMANDS@) at+=" $word" ;;
    esac
  done
  if [[ $current == --*=* ]]; then
    previous=${current%%=*}
    prefix=$previous=
    current=${current#*=}
  fi
  _ballast_option || _ballast_argument
  # Readline replaces what follows the last '=', unless '=' does not break words.
  [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$prefix}")
}

complete -F _ballast ballast
)";

std::string in_one_word(const std::vector<std::string>& words) {
  return shell_quoted(fmt::format("{}", fmt::join(words, " ")));
}

/// The call that offers the values of an option or argument.
std::string bash_values(const OptionInfo& option, const CommandInfo& program) {
  if (!option.values.empty()) {
    return fmt::format("{} {}", option.commas ? "_ballast_list" : "_ballast_words",
                       in_one_word(option.values));
  }
  return completed(completion_of(option.takes).bash, option, program);
}

std::string bash_keys(const std::vector<config::KeyInfo>& keys) {
  std::string text = "_ballast_keys='";
  for (const config::KeyInfo& key : keys) text += "\n  " + key.path;
  text += "\n'\n\n# Offers the values of a key.\n_ballast_value() {\n  case \"$1\" in\n";
  for (const config::KeyInfo& key : keys) {
    if (!key.values.empty()) {
      text += fmt::format("    {}) _ballast_words {} ;;\n", key.path, in_one_word(key.values));
    } else if (key.names_paths) {
      text += fmt::format("    {}) _ballast_files ;;\n", key.path);
    }
  }
  return text + "  esac\n}\n";
}

std::string bash_options(const CommandInfo& program) {
  std::string text =
      "\n# Offers the values of the option before the cursor; fails if it has none.\n"
      "_ballast_option() {\n  case \"$at $previous\" in\n";
  for (const CommandInfo* const command : all_commands(program)) {
    for (const OptionInfo& option : command->options) {
      if (option.positional || (option.flag && !option.optional_value())) continue;
      // The value of a flag is attached to it, that of other options is the next word.
      for (const std::string& name : option.names) {
        text += fmt::format("    {}) {} ;;\n", shell_quoted(command->path + " " + name),
                            bash_values(option, program));
      }
    }
  }
  return text + "    *) return 1 ;;\n  esac\n}\n";
}

std::string bash_arguments(const CommandInfo& program) {
  std::string text =
      "\n# Offers options, subcommands or arguments.\n_ballast_argument() {\n"
      "  case \"$at\" in\n";
  for (const CommandInfo* const command : all_commands(program)) {
    std::vector<std::string> options;
    std::string values = ":";
    for (const OptionInfo& option : command->options) {
      if (option.positional) {
        values = bash_values(option, program);
      } else {
        options.insert(options.end(), option.names.begin(), option.names.end());
      }
    }
    if (!command->commands.empty()) {
      values = "_ballast_words " + in_one_word(command->command_names());
    }
    text += fmt::format(
        "    {})\n      if [[ $current == -* ]]; then _ballast_words {}; else {}; fi ;;\n",
        shell_quoted(command->path), in_one_word(options), values);
  }
  return text + "  esac\n}\n";
}

}  // namespace

std::string bash_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys) {
  std::string main = kBashMain;
  const std::string place = "@COMMANDS@";
  main.replace(main.find(place), place.size(), command_patterns(program, " | "));
  return "# Completion of ballast for bash, written by `ballast completion bash`.\n\n" +
         bash_keys(keys) + kBashFunctions + bash_options(program) + bash_arguments(program) + main;
}

}  // namespace ballast::tools
