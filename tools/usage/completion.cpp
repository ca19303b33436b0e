#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/usage/manual.h"

namespace ballast::tools {

std::string completed(const char* call, const OptionInfo& option, const CommandInfo& program) {
  const auto& ends = option.extensions;
  return fmt::format(
      fmt::runtime(call), fmt::arg("extensions", fmt::join(ends, " ")),
      fmt::arg("patterns",
               ends.empty() ? "" : fmt::format(" -g \"(*{})(-.)\"", fmt::join(ends, "|*"))),
      fmt::arg("files", ends.size() == 1
                            ? fmt::format("-a '(__fish_complete_suffix {})'", ends.front())
                            : "-F"),
      fmt::arg("commands", fmt::join(program.command_names(), " ")));
}

std::string short_description(const std::string& description) {
  constexpr std::size_t kShortest = 4;
  std::size_t end = description.size();
  for (const char* mark : {";", " (", ": ", ", for"}) {
    const std::size_t at = description.find(mark);
    if (at != std::string::npos && at >= kShortest) end = std::min(end, at);
  }
  return description.substr(0, end);
}

std::string shell_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::vector<const CommandInfo*> all_commands(const CommandInfo& program) {
  std::vector<const CommandInfo*> list = {&program};
  for (const CommandInfo& one : program.commands) {
    const auto inner = all_commands(one);
    list.insert(list.end(), inner.begin(), inner.end());
  }
  return list;
}

std::string command_patterns(const CommandInfo& program, const std::string& separator) {
  std::string text;
  for (const CommandInfo* const command : all_commands(program)) {
    if (command == &program) continue;
    text += (text.empty() ? "" : separator) + shell_quoted(command->path);
  }
  return text;
}

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

namespace {

constexpr const char* kZshMain = R"(
# KEY=VALUE for a key of the config.
_ballast_settings() {
  if compset -P '*='; then
    _ballast_value "${${IPREFIX%=}##*[= ]}"
  else
    compadd -S '=' -- $_ballast_keys
  fi
}

_ballast() {
  local at=ballast state
  integer i first=1
  for (( i = 2; i < CURRENT; i++ )); do
    case "$at $words[i]" in
      (@COMMANDS@) at+=" $words[i]"; first=$i ;;
    esac
  done
  # _arguments reads the words from the subcommand on.
  words=("${(@)words[first,-1]}")
  (( CURRENT -= first - 1 ))
  case $at in
)";

constexpr const char* kZshEnd = R"(  esac
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _ballast "$@"
else
  compdef _ballast ballast
fi
)";

/// Escapes the text of a description or message for _arguments.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

/// The action with which _arguments completes the values.
std::string zsh_action(const OptionInfo& option, const CommandInfo& program) {
  if (!option.values.empty()) {
    const std::string values = fmt::format("{}", fmt::join(option.values, " "));
    return option.commas ? fmt::format("_values -s , value {}", values)
                         : fmt::format("({})", values);
  }
  return completed(completion_of(option.takes).zsh, option, program);
}

std::string zsh_spec(const OptionInfo& option, const CommandInfo& program) {
  const std::string action = zsh_action(option, program);
  if (option.positional) {
    return shell_quoted(
        fmt::format("{}:{}:{}", option.many ? "*" : "", zsh_text(option.name()), action));
  }
  const std::string description = zsh_text(short_description(option.description));
  std::string text;
  for (const std::string& name : option.names) {
    const bool value = !option.flag || option.optional_value();
    // "=-" means that a value is always attached.
    const char* const form = !value ? "" : option.flag ? "=-" : name.starts_with("--") ? "=" : "";
    const std::string values =
        value ? fmt::format(":{}{}:{}", option.flag ? ":" : "", zsh_text(option.value), action)
              : "";
    const std::string others =
        option.repeated ? "*" : fmt::format("({})", fmt::join(option.names, " "));
    text += (text.empty() ? "" : " ") +
            shell_quoted(fmt::format("{}{}{}[{}]{}", others, name, form, description, values));
  }
  return text;
}

std::string zsh_keys(const std::vector<config::KeyInfo>& keys) {
  std::string text = "typeset -ga _ballast_keys\n_ballast_keys=(";
  for (const config::KeyInfo& key : keys) text += "\n  " + key.path;
  text += "\n)\n\n_ballast_value() {\n  case $1 in\n";
  for (const config::KeyInfo& key : keys) {
    if (!key.values.empty()) {
      text += fmt::format("    ({}) compadd -- {} ;;\n", key.path, fmt::join(key.values, " "));
    } else if (key.names_paths) {
      text += fmt::format("    ({}) _files ;;\n", key.path);
    }
  }
  return text + "  esac\n}\n";
}

}  // namespace

std::string zsh_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys) {
  std::string main = kZshMain;
  const std::string place = "@COMMANDS@";
  main.replace(main.find(place), place.size(), command_patterns(program, "|"));
  for (const CommandInfo* const command : all_commands(program)) {
    main += fmt::format("    ({})\n      _arguments -s -S", shell_quoted(command->path));
    for (const OptionInfo& option : command->options) {
      main += " \\\n        " + zsh_spec(option, program);
    }
    if (!command->commands.empty()) {
      std::string names;
      for (const CommandInfo& one : command->commands) {
        names += fmt::format(" {}\\:{}", one.name,
                             fmt::format("\"{}\"", zsh_text(short_description(one.description))));
      }
      main += " \\\n        " + shell_quoted(fmt::format(":command:(({}))", names.substr(1)));
    }
    main += "\n      ;;\n";
  }
  return "#compdef ballast\n# Completion of ballast for zsh, written by `ballast completion "
         "zsh`.\n\n" +
         zsh_keys(keys) + main + kZshEnd;
}

namespace {

constexpr const char* kFishMain = R"(
# The command on the line: "ballast bench io".
function __ballast_command
    set -l at ballast
    for word in (commandline -opc)[2..]
        switch "$at $word"
            case @COMMANDS@
                set at "$at $word"
        end
    end
    echo $at
end

function __ballast_at
    test (__ballast_command) = "$argv"
end

# KEY=VALUE for a key of the config.
function __ballast_settings
    set -l token (string replace -r -- '^--[a-z-]+=' '' (commandline -ct))
    if not string match -q '*=*' -- $token
        printf '%s=\n' $__ballast_keys
        return
    end
    set -l key (string replace -r '=.*' '' -- $token)
    set -l value (string replace -r '^[^=]*=' '' -- $token)
    if contains -- $key $__ballast_path_keys
        printf '%s\n' $key=(__fish_complete_path $value)
        return
    end
    printf '%s\n' $key=(__ballast_values $key)
end

complete -c ballast -f
)";

/// Arguments of fish's `complete` for the values of an option or argument.
std::string fish_values(const OptionInfo& option, const CommandInfo& program) {
  if (option.values.empty()) return completed(completion_of(option.takes).fish, option, program);
  return "-a " + shell_quoted(fmt::format("{}", fmt::join(option.values, " ")));
}

std::string fish_option(const CommandInfo& command, const OptionInfo& option,
                        const CommandInfo& program) {
  std::string line =
      fmt::format("complete -c ballast -n {}", shell_quoted("__ballast_at " + command.path));
  for (const std::string& name : option.names) {
    if (option.positional) break;
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  const std::string values =
      option.flag && !option.optional_value() ? "" : fish_values(option, program);
  if (!option.positional && !option.flag) line += values == "-F" ? " -r" : " -x";
  if (!values.empty()) line += " " + values;
  if (!option.positional) {
    line += " -d " + shell_quoted(short_description(option.description));
  }
  return line + "\n";
}

std::string fish_keys(const std::vector<config::KeyInfo>& keys) {
  std::string all;
  std::string paths;
  std::string values;
  for (const config::KeyInfo& key : keys) {
    all += " \\\n    " + key.path;
    if (key.names_paths) paths += " \\\n    " + key.path;
    if (key.values.empty()) continue;
    values += fmt::format("        case {}\n            printf '%s\\n' {}\n", key.path,
                          fmt::join(key.values, " "));
  }
  return fmt::format(
      "set -g __ballast_keys{}\nset -g __ballast_path_keys{}\n\nfunction __ballast_values\n"
      "    switch $argv[1]\n{}    end\nend\n",
      all, paths, values);
}

}  // namespace

std::string fish_completion(const CommandInfo& program, const std::vector<config::KeyInfo>& keys) {
  std::string main = kFishMain;
  const std::string place = "@COMMANDS@";
  main.replace(main.find(place), place.size(), command_patterns(program, " "));
  for (const CommandInfo* const command : all_commands(program)) {
    for (const CommandInfo& one : command->commands) {
      main += fmt::format("complete -c ballast -n {} -a {} -d {}\n",
                          shell_quoted("__ballast_at " + command->path), one.name,
                          shell_quoted(short_description(one.description)));
    }
    for (const OptionInfo& option : command->options) {
      main += fish_option(*command, option, program);
    }
  }
  return "# Completion of ballast for fish, written by `ballast completion fish`.\n\n" +
         fish_keys(keys) + main;
}

}  // namespace ballast::tools
