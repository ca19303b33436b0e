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

/// A file with one row per step whose errors do not end a run. Rows that cannot be written (full
/// disk, quota, device error) wait in memory and are written, in order, before the next one. A
/// deleted file is created again. At most 16 MiB of rows wait; beyond that, the oldest are dropped.
class WaitingFile {
 public:
  /// Called with a file that was created again or reopened. If it throws, nothing is written.
  using Claim = std::function<void(const text::AppendedFile&)>;

  WaitingFile() = default;
  /// Makes a file that is created with the first row. `head` begins every new file.
  WaitingFile(std::filesystem::path path, std::string head)
      : path_(std::move(path)), head_(std::move(head)) {}
  /// Takes an open file.
  explicit WaitingFile(text::AppendedFile file, std::string head = "", Claim claim = {});

  /// Adds the row of `step` and writes all waiting rows, if possible: see failure(). Throws only
  /// exceptions of the claim.
  void append(std::uint64_t step, std::string row);
  /// Writes waiting rows, if possible.
  void flush();

  /// The error because of which rows wait; empty if all are written.
  [[nodiscard]] const std::optional<Error>& failure() const { return failure_; }
  /// A line about rows that are not in the file, because they wait or were dropped; "" if there are
  /// none.
  [[nodiscard]] std::string missing() const;
  /// Forgets waiting rows after `step`, because these steps run again.
  void forget_after(std::uint64_t step);
  /// Number of dropped rows.
  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }

  /// Returns whether the open file was deleted.
  [[nodiscard]] bool is_deleted() const;
  /// Sets the new name of the file.
  void moved_to(std::filesystem::path path) { path_ = std::move(path); }

  /// The open file; closed if nothing was written yet.
  [[nodiscard]] text::AppendedFile& file() { return file_; }
  [[nodiscard]] const text::AppendedFile& file() const { return file_; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  /// Size of the file in bytes, including waiting rows.
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
  std::deque<Row> rows_;  ///< waiting rows
  Bytes waiting_bytes_ = 0;
  std::optional<Error> failure_;
  std::uint64_t dropped_ = 0;
  std::uint64_t first_missing_ = 0;  ///< step of the first dropped row
};

}  // namespace ballast::train
