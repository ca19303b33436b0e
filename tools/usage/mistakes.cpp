#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/suggest.h"

#include "tools/usage/hints.h"
#include "tools/usage/words.h"

namespace ballast::tools {
namespace {

std::vector<std::string> long_names(const CommandInfo& command) {
  std::vector<std::string> names;
  for (const OptionInfo& option : command.options) {
    if (option.positional) continue;
    for (const std::string& name : option.names) {
      if (name.starts_with("--")) names.push_back(name);
    }
  }
  return names;
}

std::string without_dashes(std::string name) {
  name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
  return name;
}

/// The only one of `words` that begins with `beginning` or equals it; otherwise "".
std::string only_one_from(const std::string& beginning, const std::vector<std::string>& words) {
  std::string found;
  for (const std::string& word : words) {
    if (word == beginning) return word;
    if (!word.starts_with(beginning)) continue;
    if (!found.empty()) return "";
    found = word;
  }
  return found;
}

/// The option of the command that is nearest to `name`; "" if none is near. Dashes are not
/// compared, since they would make short names look alike.
std::string near_option(const CommandInfo& command, const std::string& name) {
  const std::vector<std::string> known = long_names(command);
  std::vector<std::string> words;
  std::transform(known.begin(), known.end(), std::back_inserter(words), without_dashes);
  std::string word = without_dashes(name);
  std::replace(word.begin(), word.end(), '_', '-');
  constexpr std::size_t kShortest = 4;  // shorter words are near to any other
  std::string found = word.size() < kShortest ? only_one_from(word, words) : nearest(word, words);
  return found.empty() ? "" : "--" + found;
}

std::string unknown_option(const CommandInfo& program, const CommandInfo& command,
                           const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  const std::string message = fmt::format("{} has no option {}", command.path, name);
  const std::string near = near_option(command, name);
  const std::string hint = option_hint(program, command, name);
  // A hint is about exactly this word, so it takes precedence over a word that is only similar.
  const bool same = without_dashes(near) == without_dashes(name);
  if (!near.empty() && (same || hint.empty())) {
    return fmt::format("{} (did you mean '{}'?)", message, near);
  }
  return hint.empty() ? message : fmt::format("{}: {}", message, hint);
}

/// Text editors and web pages turn "--" into one of these characters.
constexpr std::array<std::string_view, 2> kLongDashes = {"\xe2\x80\x93", "\xe2\x80\x94"};

std::string excess_argument(const CommandInfo& command, const ReadWords& read) {
  const std::vector<std::string> extra(
      read.arguments.end() - static_cast<std::ptrdiff_t>(read.excess()), read.arguments.end());
  for (const std::string& word : extra) {
    for (const std::string_view dash : kLongDashes) {
      if (!word.starts_with(dash)) continue;
      return fmt::format("'{0}' begins with a long dash; write --{1}", word,
                         word.substr(dash.size()));
    }
  }
  const bool settings =
      std::any_of(command.options.begin(), command.options.end(),
                  [](const OptionInfo& option) { return option.takes == Names::setting; });
  if (settings && std::find(extra.begin(), extra.end(), "=") != extra.end()) {
    return "a setting is one word without spaces: --set KEY=VALUE";
  }
  if (settings && extra.front().find('=') != std::string::npos) {
    return fmt::format("a setting needs --set before it: --set {}", extra.front());
  }
  return fmt::format("{} takes no more arguments, got {}", command.path,
                     extra.front().empty() ? "''" : fmt::format("{}", fmt::join(extra, " ")));
}

/// Describes a mistake in how an option is given, apart from its value; "" if there is none.
std::string mistake_of(const ReadWords::Given& given) {
  const OptionInfo& option = *given.option;
  if (option.flag && !option.optional_value()) {
    if (!given.attached || flag_value(given.values.front())) return "";
    return fmt::format("{} takes no value, got '{}'", given.name, given.values.front());
  }
  if (given.attached && given.values.front().empty()) {
    return fmt::format("{}=: must not be empty; give {}={}", given.name, given.name, option.value);
  }
  if (!option.flag && given.values.empty()) {
    return fmt::format("{} needs a value: {} {}", given.name, given.name, option.value);
  }
  return "";
}

/// Describes an option that is given twice but takes one value; "" if there is none.
std::string repetition(const ReadWords& read) {
  for (std::size_t i = 0; i < read.options.size(); ++i) {
    const ReadWords::Given& later = read.options[i];
    if (later.option->flag || later.option->repeated || later.option->many) continue;
    for (std::size_t j = 0; j < i; ++j) {
      const ReadWords::Given& earlier = read.options[j];
      if (earlier.option != later.option) continue;
      return fmt::format("{} is given twice ({} and {}); give it once", later.name,
                         earlier.values.front(), later.values.front());
    }
  }
  return "";
}

std::string missing(const CommandInfo& command, const ReadWords& read) {
  for (const OptionInfo& option : command.options) {
    if (!option.required || !read.values_of(option).empty()) continue;
    if (!option.positional) {
      return fmt::format("{} is missing; give {}", option.name(), option_text(option));
    }
    return fmt::format("{} is missing: {} {}", option.name(), command.path,
                       fmt::join(command.arguments(), " "));
  }
  return "";
}

std::string conflict(const CommandInfo& command, const ReadWords& read) {
  const auto given = [&](const std::string& name) {
    return !name.empty() && !read.values_of(*command.option(name)).empty();
  };
  for (const ReadWords::Given& one : read.options) {
    const OptionInfo& option = *one.option;
    if (!option.needs.empty() && !given(option.needs)) {
      return fmt::format("{} is for {}; give both, or neither", option.name(), option.needs);
    }
    if (given(option.excludes)) {
      return fmt::format("{} and {} exclude each other; give one of them", option.name(),
                         option.excludes);
    }
  }
  return "";
}

/// Describes an unknown command or a missing subcommand; "" if neither is the case.
std::string command_mistake(const ReadWords& read) {
  const CommandInfo& command = *read.command;
  if (read.has_unknown_command) {
    const std::string hint = command_hint(read.unknown_command);
    return fmt::format(
        "'{}' is not a {} command{}", read.unknown_command, command.name,
        hint.empty() ? did_you_mean(read.unknown_command, command.command_names()) : hint);
  }
  if (!command.needs_command) return "";
  return fmt::format("{} needs a command: {}", command.path,
                     fmt::join(command.command_names(), ", "));
}

}  // namespace

std::string mistake_in(const CommandInfo& program, const ReadWords& read) {
  const CommandInfo& command = *read.command;
  if (asks_for_help(read)) return read.has_unknown_command ? command_mistake(read) : "";
  if (!read.unknown.empty()) return unknown_option(program, command, read.unknown.front());
  if (std::string wrong = command_mistake(read); !wrong.empty()) return wrong;
  for (const ReadWords::Given& given : read.options) {
    if (std::string wrong = mistake_of(given); !wrong.empty()) return wrong;
  }
  if (std::string twice = repetition(read); !twice.empty()) return twice;
  if (read.excess() > 0) return excess_argument(command, read);
  if (std::string lacking = missing(command, read); !lacking.empty()) return lacking;
  return conflict(command, read);
}

}  // namespace ballast::tools
