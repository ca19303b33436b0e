#include "src/train/waiting_file.h"

#include <limits>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

namespace ballast::train {
namespace {

constexpr Bytes kMaxWaiting = 16 * kMiB;

}  // namespace

WaitingFile::WaitingFile(text::AppendedFile file, std::string head, Claim claim)
    : path_(file.path()),
      head_(std::move(head)),
      claim_(std::move(claim)),
      file_(std::move(file)) {}

void WaitingFile::append(std::uint64_t step, std::string row) {
  waiting_bytes_ += row.size();
  rows_.push_back({step, std::move(row)});
  flush();
  while (waiting_bytes_ > kMaxWaiting) {
    if (dropped_++ == 0) first_missing_ = rows_.front().step;
    waiting_bytes_ -= rows_.front().text.size();
    rows_.pop_front();
  }
}

void WaitingFile::flush() {
  if (rows_.empty()) return;
  try {
    if (!file_.descriptor().is_open() || is_deleted()) open();
    write_rows();
    failure_.reset();
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::io) throw;
    failure_ = error;
  }
}

void WaitingFile::write_rows() {
  if (file_.size() == 0 && !head_.empty()) file_.append(head_);
  while (!rows_.empty()) {
    const std::string& text = rows_.front().text;
    file_.append(text);
    waiting_bytes_ -= text.size();
    rows_.pop_front();
  }
}

/// An editor may have replaced a deleted file by another one.
void WaitingFile::open() {
  std::error_code ignored;
  std::filesystem::create_directories(path_.parent_path(), ignored);
  const bool again = file_.descriptor().is_open();
  text::AppendedFile file(path_, again ? O_NOFOLLOW : O_EXCL);
  if (claim_) claim_(file);
  file.cut(std::numeric_limits<Bytes>::max());  // finds its length
  file_ = std::move(file);
}

void WaitingFile::forget_after(std::uint64_t step) {
  while (!rows_.empty() && rows_.back().step > step) {
    waiting_bytes_ -= rows_.back().text.size();
    rows_.pop_back();
  }
  if (rows_.empty()) failure_.reset();
}

bool WaitingFile::is_deleted() const {
  struct stat status = {};
  return file_.descriptor().is_open() && ::fstat(file_.descriptor().number(), &status) == 0 &&
         status.st_nlink == 0;
}

std::string WaitingFile::missing() const {
  const std::uint64_t rows = dropped_ + rows_.size();
  if (rows == 0) return "";
  const std::uint64_t first = dropped_ > 0 ? first_missing_ : rows_.front().step;
  const std::string reason = failure_ ? fmt::format(" ({})", failure_->what()) : "";
  return fmt::format("{} row{} from step {} on {} not in {}{}", rows, rows == 1 ? "" : "s", first,
                     rows == 1 ? "is" : "are", path_.string(), reason);
}

}  // namespace ballast::train
