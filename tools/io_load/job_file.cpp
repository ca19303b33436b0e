#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/Config.hpp>
#include <fmt/format.h>

#include "ballast/core/error.h"

#include "tools/command_line.h"
#include "tools/io_load/load.h"

namespace ballast::tools {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& file, const std::string& message) {
  throw Error(ErrorCategory::usage, fmt::format("{}: {}", file.string(), message));
}

/// Refuses lines of one or two characters, which CLI11 ignores.
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

std::vector<CLI::ConfigItem> read_entries(const std::filesystem::path& file) {
  if (!std::filesystem::is_regular_file(file)) refuse(file, "--job: not an existing file");
  std::ifstream input(file);
  require_no_scraps(input, file);
  if (!input.eof()) refuse(file, "cannot be read");
  input.clear();
  input.seekg(0);
  return CLI::ConfigTOML().from_config(input);
}

/// Long names of the options that a file may set.
std::vector<std::string> keys_of(const Command& command) {
  std::vector<std::string> keys = command.option_names();
  std::erase_if(keys, [](const std::string& name) { return name == "help" || name == "job"; });
  return keys;
}

void apply(Command command, CLI::ConfigItem setting, const std::filesystem::path& file) {
  if (setting.name == "path") {
    for (std::string& value : setting.inputs) {
      value = (std::filesystem::absolute(file).parent_path() / value).string();
    }
  }
  try {
    command.set(setting.name, setting.inputs);
  } catch (const Error& error) {
    refuse(file, error.what());
  }
}

}  // namespace

void read_job_file(Command command, const std::filesystem::path& file) {
  const std::vector<std::string> keys = keys_of(command);
  std::vector<std::string> seen;
  for (const CLI::ConfigItem& setting : read_entries(file)) {
    const std::string& name = setting.name;
    if (!setting.parents.empty()) {
      refuse(file, fmt::format("section [{}]: job files have no sections; use one file per sweep",
                               setting.parents.front()));
    }
    if (std::find(keys.begin(), keys.end(), name) == keys.end()) {
      refuse(file, fmt::format("unknown key '{}'{}", name, did_you_mean(name, keys)));
    }
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
      refuse(file, fmt::format("{}: given twice; separate list values by commas", name));
    }
    seen.push_back(name);
    if (!command.given(name)) apply(command, setting, file);
  }
}

}  // namespace ballast::tools
