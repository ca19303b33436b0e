#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::tools {

/// The rows of a metrics.jsonl that a run may still be writing.
class MetricsLog {
 public:
  /// A column has the key of its values ("loss", "lanes.compute.busy_seconds") and an entry per
  /// row: a number, 0 or 1 for a boolean, kMissing, or kNotFinite for null. The loss of a step
  /// without targets is missing.
  using Column = std::vector<double>;
  static const double kMissing;    ///< a NaN
  static const double kNotFinite;  ///< an infinity

  explicit MetricsLog(std::filesystem::path file);

  /// Reads the lines that were added since the last call, or all if the file was replaced or
  /// truncated. Returns whether there was a change. Throws Error(io); Error(data) if no line is a
  /// row.
  bool update();

  [[nodiscard]] const std::vector<std::uint64_t>& steps() const { return steps_; }
  [[nodiscard]] std::size_t rows() const { return steps_.size(); }
  /// Number of times that the file was replaced or truncated, and read from its start again.
  [[nodiscard]] std::uint64_t restarts() const { return restarts_; }
  /// Names of the columns that any row has.
  [[nodiscard]] std::vector<std::string> keys() const;
  /// Column with rows() entries. All are missing if no row has the key.
  [[nodiscard]] Column column(const std::string& key) const;
  /// The last entry of a column that is a number, or kMissing if there is none.
  [[nodiscard]] double last(const std::string& key) const;
  /// Sentences about lines that are not rows.
  [[nodiscard]] std::vector<std::string> notes() const;

 private:
  void restart();
  void read_lines(std::string_view text);
  void add(std::string_view line);
  void drop_rows(std::size_t rows);

  std::filesystem::path file_;
  std::uint64_t inode_ = 0;
  Bytes offset_ = 0;   ///< end of the last line that was read
  std::string tail_;   ///< the end of that line, to detect that the file was replaced
  std::string begun_;  ///< a line that has no end yet
  std::vector<std::uint64_t> steps_;
  std::map<std::string, Column, std::less<>> columns_;
  std::uint64_t restarts_ = 0;
  std::uint64_t lines_ = 0;
  std::uint64_t bad_lines_ = 0;
  std::string first_bad_;
};

}  // namespace ballast::tools
