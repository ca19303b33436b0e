#include "tools/usage/command_table.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kHelpWidth = 80;
constexpr std::size_t kDescriptionColumn = 26;

constexpr const char* kBashFiles = "_ballast_files {extensions}";
constexpr const char* kZshFiles = "_files{patterns}";
constexpr const char* kFolders = "-a '(__fish_complete_directories)'";

constexpr auto kValueCompletions = std::to_array<ValueCompletion>({
    {Names::anything, "TEXT", ":", "( )", ""},
    {Names::file, "FILE", kBashFiles, kZshFiles, "{files}"},
    {Names::folder, "DIR", "_ballast_folders", "_files -/", kFolders},
    {Names::path, "PATH", kBashFiles, kZshFiles, "{files}"},
    {Names::model, "PATH", kBashFiles, kZshFiles, "{files}"},
    {Names::new_path, "PATH", "_ballast_files", "_files", "-F"},
    {Names::new_folder, "DIR", "_ballast_folders", "_files -/", kFolders},
    {Names::command, "COMMAND", "_ballast_words '{commands}'", "({commands})", "-a '{commands}'"},
    {Names::setting, "KEY=VALUE", "_ballast_setting", "_ballast_settings",
     "-a '(__ballast_settings)'"},
    {Names::key, "KEY", "_ballast_words \"$_ballast_keys\"", "compadd -- $_ballast_keys",
     "-a '$__ballast_keys'"},
});

std::string usage_line(const CommandInfo& command) {
  std::string line = "Usage: " + command.path;
  if (!command.commands.empty()) line += command.needs_command ? " COMMAND" : " [COMMAND]";
  line += " [OPTIONS]";
  for (const std::string& argument : command.arguments()) line += " " + argument;
  return line;
}

/// Adds "  name    description", wrapped. A long name has its own line.
void add_entry(std::string& text, const std::string& name, const std::string& description) {
  const std::string indent(kDescriptionColumn, ' ');
  std::string entry = wrap(description, kHelpWidth, indent);
  const std::string head = "  " + name;
  if (head.size() + 2 <= kDescriptionColumn) {
    entry.replace(0, head.size(), head);
  } else {
    entry = head + "\n" + entry;
  }
  text += entry + "\n";
}

}  // namespace

const ValueCompletion& completion_of(Names names) {
  return *std::find_if(kValueCompletions.begin(), kValueCompletions.end(),
                       [names](const ValueCompletion& kind) { return kind.names == names; });
}

const OptionInfo* CommandInfo::option(const std::string& word) const {
  const auto found = std::find_if(options.begin(), options.end(), [&](const OptionInfo& one) {
    return !one.positional &&
           std::find(one.names.begin(), one.names.end(), word) != one.names.end();
  });
  return found == options.end() ? nullptr : &*found;
}

const CommandInfo* CommandInfo::command(const std::string& word) const {
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const CommandInfo& one) { return one.name == word; });
  return found == commands.end() ? nullptr : &*found;
}

std::vector<std::string> CommandInfo::command_names() const {
  std::vector<std::string> names;
  for (const CommandInfo& one : commands) names.push_back(one.name);
  return names;
}

std::vector<std::string> CommandInfo::arguments() const {
  std::vector<std::string> list;
  for (const OptionInfo& one : options) {
    if (one.positional) list.push_back(argument_text(one));
  }
  return list;
}

std::string argument_text(const OptionInfo& option) {
  const std::string text = option.name() + (option.many ? "..." : "");
  return option.required ? text : "[" + text + "]";
}

std::string option_text(const OptionInfo& option) {
  if (option.positional) return argument_text(option);
  std::vector<std::string> names = option.names;
  std::reverse(names.begin(), names.end());  // short names first
  const std::string text = fmt::format("{}", fmt::join(names, ", "));
  if (option.optional_value()) return fmt::format("{}[={}]", text, option.value);
  if (option.flag) return text;
  const std::string list = option.commas ? ",..." : option.many ? " ..." : "";
  return fmt::format("{} {}{}", text, option.value, list);
}

std::string full_description(const OptionInfo& option) {
  std::vector<std::string> facts;
  if (!option.choices.empty()) facts.push_back(fmt::format("{}", fmt::join(option.choices, ", ")));
  if (!option.bounds.empty()) facts.push_back(option.bounds);
  if (!option.initial.empty()) facts.push_back("default: " + option.initial);
  if (option.required && !option.positional) facts.emplace_back("required");
  if (option.repeated) facts.emplace_back("may be given several times");
  if (!option.needs.empty()) facts.push_back("with " + option.needs);
  if (!option.excludes.empty()) facts.push_back("not with " + option.excludes);
  if (facts.empty()) return option.description;
  return fmt::format("{} ({})", option.description, fmt::join(facts, "; "));
}

std::string help_text(const CommandInfo& command) {
  std::string text = wrap(command.description, kHelpWidth, "") + "\n" +
                     wrap(usage_line(command), kHelpWidth, "") + "\n";
  const auto add = [&](const char* title, bool positional) {
    bool first = true;
    for (const OptionInfo& option : command.options) {
      if (option.positional != positional) continue;
      if (first) text += fmt::format("\n{}:\n", title);
      first = false;
      add_entry(text, option_text(option), full_description(option));
    }
  };
  add("Arguments", true);
  add("Options", false);
  if (command.commands.empty()) return text;
  text += "\nCommands:\n";
  for (const CommandInfo& one : command.commands) add_entry(text, one.name, one.description);
  if (command.needs_command) return text;  // only the program itself works without a command
  text += "\nExit status:\n";
  for (const ExitStatus& status : kExitStatuses) add_entry(text, status.number, status.meaning);
  return text;
}

}  // namespace ballast::tools
