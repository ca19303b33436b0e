#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/usage/completion.h"

namespace ballast::tools {
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

}  // namespace ballast::tools
