#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/usage/completion.h"

namespace ballast::tools {
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
