#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/text/json.h"

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

/// `steps` and `values` of a column for drawing. Rows are divided into at most `groups` groups.
/// Each group keeps its least and its greatest value, and a value that is not finite (null).
/// Missing entries are left out. `rows_per_group` is 1 if all rows are kept; otherwise there is a
/// coarser line `mean`.
text::Json series_json(const MetricsLog& log, const std::string& key, std::size_t groups);

/// Means over at most `groups` groups of rows. Each has `first` and `last` step and, per step,
/// `step_seconds`, `peak_bytes` by tier (the greatest), and below the name of each lane
/// `busy_seconds`, `stalled_seconds` and `bytes`. `devices` has an object for each device of a run
/// with several, with `busy_seconds` below the name of each lane that devices have.
text::Json means_json(const MetricsLog& log, std::size_t groups);

/// The number of devices of the run. Rows have entries of each device only if there are several.
std::uint32_t device_count(const MetricsLog& log);

/// The median of a column's finite entries, 0 if it has none.
double median_of(const MetricsLog& log, const std::string& key);

}  // namespace ballast::tools
