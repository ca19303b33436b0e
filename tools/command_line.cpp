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

namespace ballast::tools {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

/// The command that a command line names.
struct Named {
  const CLI::App* command = nullptr;
  std::string path;     ///< "ballast bench io"
  std::string mistake;  ///< what is wrong with the name; "" if nothing is
};

Named find_command(const CLI::App& program, std::span<char*> words) {
  Named named = {&program, program.get_name(), ""};
  for (const std::string word : words) {
    const std::vector<std::string> known = commands_of(*named.command);
    if (known.empty()) return named;
    if (word.starts_with('-')) continue;
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      named.mistake = fmt::format("'{}' is not a {} command{}", word, named.command->get_name(),
                                  did_you_mean(word, known));
      return named;
    }
    named.command = named.command->get_subcommand(word);
    named.path += " " + word;
  }
  if (named.command->get_require_subcommand_min() > 0) {
    named.mistake = fmt::format("{} needs a command: {}", named.path,
                                fmt::join(commands_of(*named.command), ", "));
  }
  return named;
}

/// A message about the first option that the command lacks; "" if there is none.
std::string unknown_option(const Named& named, std::span<char*> words) {
  std::vector<std::string> known;
  for (const CLI::Option* option : named.command->get_options(nullptr)) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const std::string_view word : words) {
    const std::string name(word.substr(0, word.find('=')));
    if (!name.starts_with("--") || name == "--") continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return fmt::format("{} has no option {}{}", named.path, name, did_you_mean(name, known));
  }
  return "";
}

/// Names the words that the command does not take: an unknown option first.
std::string unexpected(const Named& named, const CLI::ExtrasError& error, std::span<char*> words) {
  const std::string option = unknown_option(named, words);
  if (!option.empty()) return option;
  // CLI11 lists them after a colon.
  const std::string_view list = error.what();
  return fmt::format("{} takes no more arguments, got{}", named.path,
                     list.substr(list.find(':') + 1));
}

/// One line about a wrong command line: our own message, or else CLI11's.
std::string usage_message(const CLI::ParseError& error, const CLI::App& app,
                          std::span<char*> words) {
  const Named named = find_command(app, words);
  std::string message = named.mistake;
  if (const auto* extras = dynamic_cast<const CLI::ExtrasError*>(&error);
      message.empty() && extras != nullptr) {
    message = unexpected(named, *extras, words);
  }
  if (message.empty()) message = error.what();
  return fmt::format("{}; see {} --help", one_line(std::move(message)), named.path);
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

/// What is wrong with a whole number, "" if nothing is. Reads it like CLI11, which does not notice
/// numbers of more than 64 bits.
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

/// `help` describes the bounds in --help.
template <class T>
void bound(CLI::Option& option, T low, T high, const std::string& help) {
  option.check([low, high](const std::string& text) { return mistake(text, low, high); }, help);
}

/// CLI11's own checks write the whole range of a double, 309 digits, into their messages.
template <class T>
void check_numbers(const OptionRules& rules, CLI::Option& option) {
  using Limits = std::numeric_limits<T>;
  if (rules.range) {
    std::visit(
        [&](auto range) {
          bound(option, range.first, range.second,
                CLI::Range(range.first, range.second).get_description());
        },
        *rules.range);
  } else if (rules.positive) {
    const T least = std::is_integral_v<T> ? T{1} : static_cast<T>(kAboveZero);
    bound(option, least, Limits::max(), "POSITIVE");
  } else {
    bound(option, Limits::lowest(), Limits::max(), "");
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
  if (!rules.choices.empty()) option.check(CLI::IsMember(rules.choices));
  if (rules.needs != nullptr) option.needs(std::string(rules.needs));
  if (rules.show_default) option.capture_default_str();
  if (rules.shown_default != nullptr) option.default_str(rules.shown_default);
}

}  // namespace

Command Command::add_command(const std::string& name, const std::string& description) {
  return {app_->add_subcommand(name, description), chosen_};
}

void Command::require_command() {
  app_->require_subcommand(1);
}

void Command::add_option(const std::string& name, Target target, const std::string& description,
                         const OptionRules& rules) {
  std::visit(
      [&](auto* value) {
        using Value = typename Single<std::remove_pointer_t<decltype(value)>>::Type;
        apply<Value>(rules, *app_->add_option(name, *value, description));
      },
      target);
}

void Command::add_flag(const std::string& name, bool* target, const std::string& description,
                       const std::string& excludes) {
  CLI::Option* flag = app_->add_flag(name, *target, description);
  if (!excludes.empty()) flag->excludes(excludes);
}

void Command::add_flag(const std::string& name, std::string* target, const std::string& description,
                       const std::string& shown) {
  app_->add_flag(name, *target, description)->option_text("[=" + shown + "]");
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
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->require_subcommand(0, 1);
}

CommandLine::~CommandLine() = default;

Command CommandLine::program() {
  return {app_.get(), &action_};
}

bool CommandLine::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
    return true;
  } catch (const CLI::CallForHelp&) {
    return false;
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorCategory::usage,
                usage_message(error, *app_, std::span(argv + 1, argv + argc)));
  }
}

std::string CommandLine::help() const {
  return app_->help();
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
