#include "tools/command_line.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/text/output_file.h"

#include "tools/usage/words.h"

namespace ballast::tools {
namespace {

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

/// Describes a mistake in a whole number; "" if there is none.
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

/// Describes a mistake in the value of an option; "" if there is none. `T` is the type of one
/// value.
template <class T>
std::string mistake(const OptionInfo& option, const std::string& text) {
  using Limits = std::numeric_limits<T>;
  std::string wrong;
  if constexpr (!std::is_arithmetic_v<T>) {
    // An empty word usually comes from a shell variable that is not set.
    const bool needed = option.required || std::is_same_v<T, std::filesystem::path>;
    if (needed && text.empty()) return "must not be empty";
  } else if (option.range) {
    wrong = std::visit([&](auto range) { return mistake(text, range.first, range.second); },
                       *option.range);
  } else if (option.positive) {
    const T least = std::is_integral_v<T> ? T{1} : static_cast<T>(kAboveZero);
    wrong = mistake(text, least, Limits::max());
  } else {
    wrong = mistake(text, Limits::lowest(), Limits::max());
  }
  if (wrong.empty()) wrong = path_mistake(option.takes, text);
  if (!wrong.empty() || option.choices.empty()) return wrong;
  if (std::find(option.choices.begin(), option.choices.end(), text) != option.choices.end())
    return "";
  return fmt::format("must be one of {}, got '{}'{}", listed(option.choices), text,
                     did_you_mean(text, option.choices));
}

/// Name of standard output as the value of an option that names a file to write.
constexpr std::string_view kStandardOutput = "-";

/// Converts a value that has no mistakes.
template <class T>
T value_of(const OptionInfo& option, const std::string& text) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::strtod(text.c_str(), nullptr);
  } else if constexpr (std::is_integral_v<T>) {
    return text.starts_with('-') ? static_cast<T>(std::strtoll(text.c_str(), nullptr, 0))
                                 : static_cast<T>(std::strtoull(text.c_str(), nullptr, 0));
  } else if (option.takes == Names::new_path) {
    const std::string path = text == kStandardOutput ? "/dev/stdout" : text;
    text::reserve_standard_output(path);
    return T(path);
  } else {
    return T(text);
  }
}

std::vector<std::string> split_at_commas(const std::vector<std::string>& words) {
  std::vector<std::string> values;
  for (const std::string& word : words) {
    for (std::size_t start = 0; start <= word.size();) {
      const std::size_t comma = std::min(word.find(',', start), word.size());
      if (comma > start || word.empty()) values.push_back(word.substr(start, comma - start));
      start = comma + 1;
    }
  }
  return values;
}

/// Text of a default value in the help.
template <class T>
const char* value_placeholder(Names takes) {
  return std::is_integral_v<T>     ? "N"
         : std::is_arithmetic_v<T> ? "NUMBER"
                                   : completion_of(takes).placeholder;
}

std::string bounds_text(const OptionInfo& option, bool whole) {
  if (option.range) {
    return std::visit([](auto range) { return fmt::format("{} to {}", range.first, range.second); },
                      *option.range);
  }
  if (!option.positive) return "";
  return whole ? "at least 1" : "above 0";
}

/// A default for the help; "" for values that the help does not show.
template <class T>
std::string shown(const T& value) {
  if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value.string();
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return fmt::format("{}", value);
  }
  return "";
}

/// Adds names like "-v,--verbose". The long names come first.
void name_option(OptionInfo& option, const std::string& name, const std::string& description) {
  option.names = split_at_commas({name});
  std::stable_partition(option.names.begin(), option.names.end(),
                        [](const std::string& one) { return one.starts_with("--"); });
  option.description = description;
  option.positional = !name.starts_with('-');
}

CommandInfo new_command(const std::string& parent, const std::string& name,
                        const std::string& description) {
  CommandInfo info = {.name = name, .path = parent + name, .description = description};
  info.options.push_back(
      {.names = {"--help", "-h"}, .description = "Print this help", .flag = true});
  return info;
}

}  // namespace

Command Command::add_command(const std::string& name, const std::string& description) {
  info_->commands.push_back(new_command(info_->path + " ", name, description));
  return {line_, &info_->commands.back()};
}

void Command::require_command() {
  info_->needs_command = true;
}

void Command::add_option(const std::string& name, Target target, const std::string& description,
                         OptionInfo option) {
  name_option(option, name, description);
  const auto add = [&](auto* value) {
    using Given = std::remove_pointer_t<decltype(value)>;
    using Value = typename Single<Given>::Type;
    constexpr bool kList = std::is_same_v<Given, std::vector<Value>>;
    const bool path = std::is_same_v<Value, std::filesystem::path>;
    if (path && option.takes == Names::anything) option.takes = Names::path;
    if (option.value.empty()) option.value = value_placeholder<Value>(option.takes);
    option.bounds = bounds_text(option, std::is_integral_v<Value>);
    if (option.show_default) option.initial = shown(*value);
    if (!option.choices.empty()) option.values = option.choices;
    option.many = kList && !option.single_argument;
    option.repeated = kList && !option.positional;
    option.set = [value, option](const std::vector<std::string>& words) -> std::string {
      std::vector<std::string> texts = option.commas ? split_at_commas(words) : words;
      if (!kList && texts.size() > 1) return fmt::format("takes one value, got {}", texts.size());
      if (texts.empty()) texts.emplace_back();
      std::vector<Value> values;
      for (const std::string& text : texts) {
        if (std::string wrong = mistake<Value>(option, text); !wrong.empty()) return wrong;
        values.push_back(value_of<Value>(option, text));
      }
      if constexpr (kList) {
        *value = std::move(values);
      } else {
        *value = std::move(values.front());
      }
      return "";
    };
  };
  std::visit(add, target);
  info_->options.push_back(std::move(option));
}

void Command::add_flag(const std::string& name, bool* target, const std::string& description,
                       const std::string& excludes) {
  OptionInfo option = {.excludes = excludes, .flag = true};
  name_option(option, name, description);
  option.set = [target](const std::vector<std::string>& words) -> std::string {
    const std::optional<bool> on = flag_value(words.back());
    if (words.size() > 1 || !on) return "must be true or false";
    *target = *on;
    return "";
  };
  info_->options.push_back(std::move(option));
}

void Command::add_flag(const std::string& name, std::string* target, const std::string& description,
                       const std::string& shown) {
  OptionInfo option = {.takes = Names::path, .value = shown, .flag = true};
  name_option(option, name, description);
  option.set = [target](const std::vector<std::string>& words) {
    *target = words.back();
    return std::string();
  };
  info_->options.push_back(std::move(option));
}

void Command::set_action(const Action& action) {
  info_->action = action;
}

std::vector<std::string> Command::option_names() const {
  std::vector<std::string> names;
  for (const OptionInfo& option : info_->options) {
    if (option.name().starts_with("--")) names.push_back(option.name().substr(2));
  }
  return names;
}

bool Command::given(const std::string& name) const {
  return !line_->words().values_of(*info_->option("--" + name)).empty();
}

void Command::set(const std::string& name, const std::vector<std::string>& values) {
  const std::string wrong = info_->option("--" + name)->set(values);
  if (!wrong.empty()) throw Error(ErrorCategory::usage, fmt::format("--{}: {}", name, wrong));
}

CommandLine::CommandLine(const std::string& name, const std::string& description)
    : table_(new_command("", name, description)) {
  words_.command = &table_;
}

bool CommandLine::parse(const std::vector<std::string>& words) {
  words_ = read_words(table_, words);
  const auto refuse = [&](const std::string& message) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}; see {} --help", message, words_.command->path));
  };
  if (const std::string wrong = mistake_in(table_, words_); !wrong.empty()) refuse(wrong);
  if (asks_for_help(words_)) return false;
  const auto set_options = [&](const CommandInfo& command) {
    for (const OptionInfo& option : command.options) {
      const std::vector<std::string> values = words_.values_of(option);
      if (values.empty()) continue;
      const std::string wrong = option.set(values);
      if (!wrong.empty()) refuse(fmt::format("{}: {}", option.name(), wrong));
    }
  };
  set_options(table_);
  if (words_.command != &table_) set_options(*words_.command);
  return true;
}

std::string CommandLine::help(const std::vector<std::string>& command) const {
  std::vector<std::string> words = command;
  words.emplace_back("--help");
  const ReadWords read = read_words(table_, words);
  const std::string wrong = mistake_in(table_, read);
  if (!wrong.empty()) {
    throw Error(ErrorCategory::usage, fmt::format("{}; see {} --help", wrong, table_.name));
  }
  return help_text(*read.command);
}

bool CommandLine::chosen(const std::string& command) const {
  return words_.command == table_.command(command);
}

}  // namespace ballast::tools
