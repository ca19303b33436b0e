#include "tools/io/job_file.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

namespace ballast::tools {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& file, const std::string& message) {
  throw Error(ErrorCategory::usage, fmt::format("{}: {}", file.string(), message));
}

/// Refuses lines of one or two characters, which CLI11's reader ignores.
void require_no_scraps(std::istream& input, const std::filesystem::path& file) {
  std::string line;
  for (int number = 1; std::getline(input, line); ++number) {
    const auto first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#' || line[first] == ';') continue;
    const auto last = line.find_last_not_of(" \t\r");
    const std::string word = line.substr(first, last - first + 1);
    if (word.size() < 3 && word != "]" && word != "],") {
      refuse(file, fmt::format("line {}: '{}' is not an option", number, word));
    }
  }
}

std::vector<CLI::ConfigItem> read_items(const std::filesystem::path& file) {
  if (!std::filesystem::is_regular_file(file)) refuse(file, "--job: not an existing file");
  std::ifstream input(file);
  require_no_scraps(input, file);
  if (!input.eof()) refuse(file, "cannot be read");
  return CLI::ConfigTOML().from_file(file.string());
}

/// Long names of the options that a file may set.
std::vector<std::string> keys_of(const CLI::App& command) {
  std::vector<std::string> keys;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      if (name != "help" && name != "job") keys.push_back(name);
    }
  }
  return keys;
}

void apply(CLI::Option& option, CLI::ConfigItem item, const std::filesystem::path& file) {
  if (item.name == "path") {
    for (std::string& input : item.inputs) {
      input = (std::filesystem::absolute(file).parent_path() / input).string();
    }
  }
  if (option.get_expected_min() == 0) {
    if (item.inputs.size() != 1) refuse(file, item.name + ": must be true or false, not a list");
    option.add_result(option.get_flag_value(item.name, item.inputs.front()));
  } else {
    option.add_result(item.inputs);
  }
  option.run_callback();
}

}  // namespace

void read_job_file(CLI::App& command, const std::filesystem::path& file) {
  const std::vector<std::string> keys = keys_of(command);
  std::vector<std::string> given;
  for (const std::string& key : keys) {
    if (command.get_option("--" + key)->count() > 0) given.push_back(key);
  }
  std::vector<std::string> seen;
  try {
    for (const CLI::ConfigItem& item : read_items(file)) {
      if (!item.parents.empty()) {
        refuse(file, fmt::format("section [{}]: job files have no sections; use one file per sweep",
                                 item.parents.front()));
      }
      if (std::find(keys.begin(), keys.end(), item.name) == keys.end()) {
        refuse(file, fmt::format("unknown key '{}'{}", item.name, did_you_mean(item.name, keys)));
      }
      if (std::find(seen.begin(), seen.end(), item.name) != seen.end()) {
        refuse(file, fmt::format("{}: given twice; separate list values by commas", item.name));
      }
      seen.push_back(item.name);
      if (std::find(given.begin(), given.end(), item.name) != given.end()) continue;
      apply(*command.get_option("--" + item.name), item, file);
    }
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    refuse(file, message);
  }
}

}  // namespace ballast::tools
