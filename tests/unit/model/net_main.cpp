// The tests of this program compare tables with files of tests/data. For people and for
// tools/dev/compare_calls.sh:
//
//     unit_model_net --write                    writes all files anew, after an intended change
//     unit_model_net --table FILE               prints a table as it is now
//     unit_model_net --dump FILE NAME [COLUMN]  prints the texts of a line, whose hashes the file
//     has

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/fixtures.h"
#include "tests/unit/model/golden_table.h"

namespace ballast::model_net {
namespace {

std::array<const GoldenTable*, 3> all_tables() {
  return {&layer_calls(), &kernel_sizes(), &block_specs()};
}

const GoldenTable* find_table(std::string_view file) {
  const auto all = all_tables();
  const auto found =
      std::ranges::find_if(all, [&](const GoldenTable* table) { return table->file == file; });
  if (found != all.end()) return *found;
  fmt::print(stderr, "there is no table {}\n", file);
  return nullptr;
}

bool write_text(const std::string& path, const std::string& text) {
  std::ofstream file(test::fixture(path));
  file << text;
  file.close();
  if (!file) fmt::print(stderr, "{} cannot be written\n", test::fixture(path).string());
  return static_cast<bool>(file);
}

int write_files() {
  for (const GoldenTable* table : all_tables()) {
    if (table->absent.empty()) continue;
    fmt::print(stderr, "{} has lines that need a build with CUDA\n", table->file);
    return 2;
  }
  bool written = true;
  for (const GoldenTable* table : all_tables()) {
    written = write_text(table->file, text_of(*table)) && written;
  }
  const auto wanted = full_lists();
  for (const GoldenRow& row : layer_calls().rows()) {
    if (std::ranges::find(wanted, row.name) == wanted.end()) continue;
    written = write_text(path_of_full_list(row.name), full_list(row)) && written;
  }
  return written ? 0 : 1;
}

int dump(const std::string& file, const std::string& name, const std::string& column) {
  const GoldenTable* const table = find_table(file);
  if (table == nullptr) return 2;
  for (const GoldenRow& row : table->rows()) {
    if (row.name != name) continue;
    for (std::size_t c = 0; c < row.texts.size(); ++c) {
      if (!column.empty() && table->columns[c] != column) continue;
      fmt::print("# {}\n{}\n", table->columns[c], row.texts[c]);
    }
    return 0;
  }
  fmt::print(stderr, "{} has no line {}\n", file, name);
  return 2;
}

int print_table(const std::string& file) {
  const GoldenTable* const table = find_table(file);
  if (table == nullptr) return 2;
  fmt::print("{}", text_of(*table));
  return 0;
}

}  // namespace
}  // namespace ballast::model_net

int main(int argc, char** argv) {
  using namespace ballast::model_net;
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--write") return write_files();
  if (option == "--table" && argc > 2) return print_table(argv[2]);
  if (option == "--dump" && argc > 3) return dump(argv[2], argv[3], argc > 4 ? argv[4] : "");
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
