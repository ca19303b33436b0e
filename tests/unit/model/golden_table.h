#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ballast::model_net {

/// A row of a table in tests/data. The file has a line per row: the name, then for each column a
/// hash of its text, or "-" if the text is empty.
struct GoldenRow {
  std::string name;
  std::vector<std::string> texts;  ///< by column
};
struct GoldenTable {
  std::string file;                       ///< below tests/data
  std::vector<std::string_view> columns;  ///< their names
  std::vector<GoldenRow> (*rows)() = nullptr;
  bool hashes = true;  ///< false: a file has the texts themselves
  /// Names of rows that this build cannot make begin with it; "": it makes all.
  std::string_view absent = {};
};

/// All lines of the file, as the program makes them now.
std::string text_of(const GoldenTable& table);
/// Adds a failure for each line that differs from the file, with its name and its columns.
void compare_with_file(const GoldenTable& table);

/// The tables of this program.
const GoldenTable& layer_calls();
const GoldenTable& kernel_sizes();
const GoldenTable& block_specs();
/// The models whose calls of layers are also there in full, as files below tests/data/layer_calls.
std::vector<std::string> full_lists();
/// Returns the path of such a file below tests/data.
std::string path_of_full_list(const std::string& name);
/// Returns the text of such a file.
std::string full_list(const GoldenRow& row);

}  // namespace ballast::model_net
