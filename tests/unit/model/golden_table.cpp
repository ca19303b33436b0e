#include "tests/unit/model/golden_table.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/core/random.h"

#include "tests/support/fixtures.h"

namespace ballast::model_net {
namespace {

/// Returns the words of a line; a line of texts has one word after the name.
std::vector<std::string> cells_of(const std::string& line, bool hashes) {
  std::vector<std::string> cells;
  std::size_t begin = 0;
  while (begin < line.size()) {
    const bool rest = !hashes && cells.size() == 1;
    const std::size_t end = rest ? line.size() : std::min(line.find(' ', begin), line.size());
    cells.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return cells;
}

std::string line_of(const GoldenTable& table, const GoldenRow& row) {
  std::string line = row.name;
  for (const std::string& text : row.texts) {
    line += ' ';
    line += !table.hashes ? text : text.empty() ? "-" : fmt::format("{:016x}", fnv1a(text));
  }
  return line;
}

std::map<std::string, std::string> lines_of(std::istream& file) {
  std::map<std::string, std::string> lines;
  for (std::string line; std::getline(file, line);) lines[line.substr(0, line.find(' '))] = line;
  return lines;
}

std::string advice(const GoldenTable& table, const std::string& name) {
  return fmt::format(
      "tools/dev/compare_calls.sh OLD_BUILD NEW_BUILD {} {} prints the first line that differs "
      "from "
      "an older build. After an intended change write the files anew: unit_model_net --write",
      table.file, name);
}

}  // namespace

std::string text_of(const GoldenTable& table) {
  std::string text = fmt::format("name {}\n", fmt::join(table.columns, " "));
  for (const GoldenRow& row : table.rows()) text += line_of(table, row) + "\n";
  return text;
}

void compare_with_file(const GoldenTable& table) {
  std::ifstream file(test::fixture(table.file));
  auto golden = lines_of(file);
  std::istringstream made(text_of(table));
  for (const auto& [name, line] : lines_of(made)) {
    const auto before = golden.find(name);
    if (before == golden.end()) {
      ADD_FAILURE() << table.file << " has no line for " << name << ". " << advice(table, name);
      continue;
    }
    const std::string expected = before->second;
    golden.erase(before);
    if (line == expected) continue;
    const auto now = cells_of(line, table.hashes);
    const auto then = cells_of(expected, table.hashes);
    std::vector<std::string_view> differing;
    for (std::size_t c = 0; c < table.columns.size(); ++c) {
      const auto cell = [c](const auto& cells) { return c + 1 < cells.size() ? cells[c + 1] : ""; };
      if (cell(now) != cell(then)) differing.push_back(table.columns[c]);
    }
    ADD_FAILURE() << fmt::format(
        "{} differs from {} in: {}{}. {}", name, table.file, fmt::join(differing, ", "),
        table.hashes ? "" : fmt::format("\n  {}\n  {}", expected, line), advice(table, name));
  }
  for (const auto& [name, line] : golden) {
    if (!table.absent.empty() && name.starts_with(table.absent)) continue;
    ADD_FAILURE() << table.file << " has a line for " << name
                  << ", which is not recorded any more. " << advice(table, name);
  }
}

}  // namespace ballast::model_net
