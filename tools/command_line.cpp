#include "tools/command_line.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

// Compiling its templates takes seconds per source, so no other source includes it.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

#include "tools/usage/paths.h"
#include "tools/usage/words.h"

namespace ballast::tools {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// The type of one value of an option.
template <class T>
struct Single {
  using Type = T;
};
template <class T>
struct Single<std::optional<T>> {
  using Type = T;
};
template <class T>
struct Single<std::vector<T>> {
  using Type = T;
};

/// Describes what is wrong with a whole number; "" if nothing is. Reads it like CLI11, which does
/// not notice numbers of more than 64 bits.
template <class T>
std::string mistake(const std::string& text, T low, T high) {
  char* end = nullptr;
  bool below = false;
  bool above = false;
  errno = 0;
  if (text.find('-') == std::string::npos) {
    const auto number = std::strtoull(text.c_str(), &end, 0);
    below = std::cmp_less(number, low);
    above = errno == ERANGE || std::cmp_greater(number, high);
  } else {
    const auto number = std::strtoll(text.c_str(), &end, 0);
    below = std::cmp_less(number, low);
    above = std::cmp_greater(number, high);
  }
  if (text.empty() || *end != '\0') return fmt::format("must be a whole number, got '{}'", text);
  if (below) return fmt::format("must be at least {}, got {}", low, text);
  if (above) return fmt::format("must be at most {}, got {}", high, text);
  return "";
}

constexpr double kAboveZero = std::numeric_limits<double>::denorm_min();

std::string mistake(const std::string& text, double low, double high) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(number)) {
    return fmt::format("must be a finite number, got '{}'", text);
  }
  if (number < low) {
    return low == kAboveZero ? fmt::format("must be greater than 0, got {}", text)
                             : fmt::format("must be at least {}, got {}", low, text);
  }
  if (number > high) return fmt::format("must be at most {}, got {}", high, text);
  return "";
}

template <class T>
void bound(CLI::Option& option, T low, T high) {
  option.check([low, high](const std::string& text) { return mistake(text, low, high); });
}

/// CLI11's own checks write the whole range of a double, 309 digits, into their messages.
template <class T>
void check_numbers(const OptionRules& rules, CLI::Option& option) {
  using Limits = std::numeric_limits<T>;
  if (rules.range) {
    std::visit([&](auto range) { bound(option, range.first, range.second); }, *rules.range);
  } else if (rules.positive) {
    const T least = std::is_integral_v<T> ? T{1} : static_cast<T>(kAboveZero);
    bound(option, least, Limits::max());
  } else {
    bound(option, Limits::lowest(), Limits::max());
  }
}

/// An empty word usually comes from a shell variable that is not set.
void refuse_empty(CLI::Option& option) {
  option.check([](const std::string& text) -> std::string {
    return text.empty() ? "must not be empty" : "";
  });
}

/// `T`: the type of one value.
template <class T>
void apply(const OptionRules& rules, CLI::Option& option) {
  option.required(rules.required);
  if (rules.commas) option.delimiter(',');
  if (rules.single_argument) option.allow_extra_args(false);
  if constexpr (std::is_arithmetic_v<T>) {
    check_numbers<T>(rules, option);
  } else if (rules.required || std::is_same_v<T, std::filesystem::path>) {
    refuse_empty(option);
  }
  option.check(
      [takes = rules.takes](const std::string& text) { return path_mistake(takes, text); });
  if (!rules.choices.empty()) {
    option.check([choices = rules.choices](const std::string& text) -> std::string {
      if (std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
      return fmt::format("must be one of {}, got '{}'{}", listed(choices), text,
                         did_you_mean(text, choices));
    });
  }
  if (rules.needs != nullptr) option.needs(std::string(rules.needs));
  if (rules.show_default) option.capture_default_str();
}

/// Text of a default value in the help.
template <class T>
const char* value_placeholder(Names takes) {
  if (std::is_integral_v<T>) return "N";
  if (std::is_arithmetic_v<T>) return "NUMBER";
  switch (takes) {
    case Names::file:
      return "FILE";
    case Names::folder:
    case Names::new_folder:
      return "DIR";
    case Names::path:
    case Names::model:
    case Names::new_path:
      return "PATH";
    case Names::command:
      return "COMMAND";
    case Names::setting:
      return "KEY=VALUE";
    case Names::key:
      return "KEY";
    case Names::anything:
      break;
  }
  return "TEXT";
}

std::string range_text(const OptionRules& rules, bool whole) {
  if (rules.range) {
    return std::visit([](auto range) { return fmt::format("{} to {}", range.first, range.second); },
                      *rules.range);
  }
  if (!rules.positive) return "";
  return whole ? "at least 1" : "above 0";
}

std::vector<std::string> names_of(const CLI::Option& option) {
  if (option.get_positional()) return {option.get_name()};
  std::vector<std::string> names;
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  return names;
}

OptionInfo info_of(const CLI::Option& option) {
  return {.names = names_of(option),
          .value = "",
          .description = option.get_description(),
          .positional = option.get_positional()};
}

/// `T`: the type of one value.
template <class T>
OptionInfo info_of(const OptionRules& rules, const CLI::Option& option, bool list) {
  OptionInfo info = info_of(option);
  const bool path = std::is_same_v<T, std::filesystem::path> && rules.takes == Names::anything;
  info.takes = path ? Names::path : rules.takes;
  info.value = rules.value != nullptr ? rules.value : value_placeholder<T>(info.takes);
  info.range = range_text(rules, std::is_integral_v<T>);
  info.initial = rules.shown_default != nullptr ? rules.shown_default : option.get_default_str();
  info.choices = rules.choices;
  info.values = rules.choices.empty() ? rules.values : rules.choices;
  info.extensions = rules.extensions;
  info.required = rules.required;
  info.many = list && !rules.single_argument;
  info.repeated = list && !info.positional;
  info.commas = rules.commas;
  if (rules.needs != nullptr) info.needs = rules.needs;
  return info;
}

CommandInfo new_command(const std::string& parent, const std::string& name,
                        const std::string& description) {
  CommandInfo info = {.name = name, .path = parent + name, .description = description};
  info.options.push_back(
      {.names = {"--help", "-h"}, .value = "", .description = "Print this help", .flag = true});
  return info;
}

}  // namespace

Command Command::add_command(const std::string& name, const std::string& description) {
  CLI::App* const app = app_->add_subcommand(name, description);
  app->fallthrough();  // --verbose may follow the command
  info_->commands.push_back(new_command(info_->path + " ", name, description));
  return {app, chosen_, &info_->commands.back()};
}

void Command::require_command() {
  app_->require_subcommand(1);
  info_->needs_command = true;
}

void Command::add_option(const std::string& name, Target target, const std::string& description,
                         const OptionRules& rules) {
  std::visit(
      [&](auto* value) {
        using Given = std::remove_pointer_t<decltype(value)>;
        using Value = typename Single<Given>::Type;
        CLI::Option& option = *app_->add_option(name, *value, description);
        apply<Value>(rules, option);
        const bool list = std::is_same_v<Given, std::vector<Value>>;
        info_->options.push_back(info_of<Value>(rules, option, list));
      },
      target);
}

void Command::add_flag(const std::string& name, bool* target, const std::string& description,
                       const std::string& excludes) {
  CLI::Option* flag = app_->add_flag(name, *target, description);
  if (!excludes.empty()) flag->excludes(excludes);
  OptionInfo info = info_of(*flag);
  info.flag = true;
  info.excludes = excludes;
  info_->options.push_back(std::move(info));
}

void Command::add_flag(const std::string& name, std::string* target, const std::string& description,
                       const std::string& shown) {
  OptionInfo info = info_of(*app_->add_flag(name, *target, description));
  info.flag = true;
  info.value = shown;
  info.takes = Names::path;
  info_->options.push_back(std::move(info));
}

void Command::set_action(const Action& action) {
  app_->callback([chosen = chosen_, action] { *chosen = action; });
}

std::vector<std::string> Command::option_names() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : std::as_const(*app_).get_options()) {
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  return names;
}

bool Command::given(const std::string& name) const {
  return app_->count("--" + name) > 0;
}

void Command::set(const std::string& name, const std::vector<std::string>& values) {
  CLI::Option& option = *app_->get_option("--" + name);
  const bool flag = option.get_expected_min() == 0;
  if (flag && values.size() != 1) {
    throw Error(ErrorCategory::usage, name + ": must be true or false, not a list");
  }
  try {
    if (flag) {
      option.add_result(option.get_flag_value(name, values.front()));
    } else {
      option.add_result(values);
    }
    option.run_callback();
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorCategory::usage, one_line(error.what()));
  }
}

CommandLine::CommandLine(const std::string& name, const std::string& description)
    : app_(std::make_unique<CLI::App>(description, name)),
      table_(new_command("", name, description)) {
  app_->require_subcommand(0, 1);
}

CommandLine::~CommandLine() = default;

Command CommandLine::program() {
  return {app_.get(), &action_, &table_};
}

bool CommandLine::parse(std::vector<std::string> words) {
  const auto refuse = [&](const std::string& message) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}; see {} --help", message, read_words(table_, words).command->path));
  };
  if (const std::string mistake = mistake_in(table_, words); !mistake.empty()) refuse(mistake);
  std::vector<std::string> last_first(words.rbegin(), words.rend());
  try {
    app_->parse(last_first);
    return true;
  } catch (const CLI::CallForHelp&) {
    return false;
  } catch (const CLI::ParseError& error) {
    refuse(one_line(error.what()));
  }
  return false;
}

std::string CommandLine::help() const {
  const CommandInfo* info = &table_;
  for (const CLI::App* app = app_.get(); !app->get_subcommands().empty();) {
    app = app->get_subcommands().front();
    info = info->command(app->get_name());
  }
  return help_text(*info);
}

std::string CommandLine::help(const std::vector<std::string>& command) const {
  std::vector<std::string> words = command;
  words.emplace_back("--help");
  const std::string mistake = mistake_in(table_, words);
  if (!mistake.empty()) {
    throw Error(ErrorCategory::usage, fmt::format("{}; see {} --help", mistake, table_.name));
  }
  return help_text(*read_words(table_, words).command);
}

bool CommandLine::chosen(const std::string& command) const {
  return app_->got_subcommand(command);
}

std::vector<Setting> read_settings(std::istream& input) {
  std::vector<Setting> settings;
  for (CLI::ConfigItem& item : CLI::ConfigTOML().from_config(input)) {
    settings.push_back({std::move(item.parents), std::move(item.name), std::move(item.inputs)});
  }
  return settings;
}

}  // namespace ballast::tools
