#include "tools/command_line.h"

#include <algorithm>
#include <utility>

// Compiling its templates takes seconds per source, so no other source includes it.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

namespace ballast::tools {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// A message about the first word that is not a command where one is expected; "" if there is none.
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* place = &app;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::string> known;
    const CLI::App* next = nullptr;
    for (const auto* command : place->get_subcommands(nullptr)) {
      known.push_back(command->get_name());
      if (command->get_name() == argv[i]) next = command;
    }
    if (known.empty()) return "";
    if (argv[i][0] == '-') continue;
    if (next == nullptr) {
      return fmt::format("'{}' is not a {} command{}", argv[i], place->get_name(),
                         did_you_mean(argv[i], known));
    }
    place = next;
  }
  return "";
}

/// One line about a wrong command line: our own message, or else CLI11's.
std::string usage_message(const CLI::ParseError& error, const CLI::App& app, int argc,
                          char** argv) {
  std::string message = unknown_command(app, argc, argv);
  if (message.empty()) message = error.what();
  return one_line(std::move(message)) + "; see ballast --help";
}

void apply(const OptionRules& rules, CLI::Option& option) {
  option.required(rules.required);
  if (rules.commas) option.delimiter(',');
  if (rules.single_argument) option.allow_extra_args(false);
  if (rules.positive) option.check(CLI::PositiveNumber);
  if (rules.range) {
    std::visit([&](auto range) { option.check(CLI::Range(range.first, range.second)); },
               *rules.range);
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
  std::visit([&](auto* value) { apply(rules, *app_->add_option(name, *value, description)); },
             target);
}

void Command::add_flag(const std::string& name, bool* target, const std::string& description,
                       const std::string& excludes) {
  CLI::Option* flag = app_->add_flag(name, *target, description);
  if (!excludes.empty()) flag->excludes(excludes);
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
    throw Error(ErrorCategory::usage, usage_message(error, *app_, argc, argv));
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
