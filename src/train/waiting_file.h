#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/files.h"

namespace ballast::train {

/// A file of rows, one for each step, that does not end a run. Rows that cannot be written (a full
/// disk, a quota, an error of the device) wait in memory and are written, in their order, before
/// the next one. A file that was deleted is made again. Rows beyond 16 MiB are dropped, the oldest
/// first.
class WaitingFile {
 public:
  /// Called with a file that was made again or opened anew; may throw, then nothing is written.
  using Claim = std::function<void(const text::AppendedFile&)>;

  WaitingFile() = default;
  /// A file that is created with the first row. `head` begins every new file.
  WaitingFile(std::filesystem::path path, std::string head)
      : path_(std::move(path)), head_(std::move(head)) {}
  /// A file that is open.
  explicit WaitingFile(text::AppendedFile file, std::string head = "", Claim claim = {});

  /// Adds the row of `step` and writes all that wait, if it can: see failure(). Throws only what
  /// the claim throws.
  void append(std::uint64_t step, std::string row);
  /// Writes what waits, if it can.
  void flush();

  /// The error because of which rows wait; none if all are written.
  [[nodiscard]] const std::optional<Error>& failure() const { return failure_; }
  /// A line about rows that are not in the file, because they wait or were dropped; "" if all are.
  [[nodiscard]] std::string missing() const;
  /// Forgets the rows after `step` that wait: they come again.
  void forget_after(std::uint64_t step);
  /// Rows that were dropped.
  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }

  /// Whether the open file has no name any more.
  [[nodiscard]] bool is_deleted() const;
  /// The file has another name now.
  void moved_to(std::filesystem::path path) { path_ = std::move(path); }

  /// The open file; closed if nothing was written yet.
  [[nodiscard]] text::AppendedFile& file() { return file_; }
  [[nodiscard]] const text::AppendedFile& file() const { return file_; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  /// Bytes of the file when all that waits is in it.
  [[nodiscard]] Bytes size() const { return file_.size() + waiting_bytes_; }

 private:
  struct Row {
    std::uint64_t step = 0;
    std::string text;
  };
  void open();
  void write_rows();

  std::filesystem::path path_;
  std::string head_;
  Claim claim_;
  text::AppendedFile file_;
  std::deque<Row> rows_;  ///< that wait
  Bytes waiting_bytes_ = 0;
  std::optional<Error> failure_;
  std::uint64_t dropped_ = 0;
  std::uint64_t first_missing_ = 0;  ///< step of the first row that was dropped
};

}  // namespace ballast::train
