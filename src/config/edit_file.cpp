#include <cerrno>
#include <cstdio>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/config/edit.h"
#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"

#include "src/config/read_file.h"

namespace ballast::config {
namespace {

[[noreturn]] void fail(const std::string& what, const std::filesystem::path& file) {
  const int error_number = errno;
  throw Error(ErrorCategory::io, fmt::format("{} {}", what, file.string()), error_number);
}

/// A file beside the one that it is to replace; removed unless it does.
class Replacement {
 public:
  Replacement(std::filesystem::path target, mode_t mode)
      : target_(std::move(target)),
        path_(target_.parent_path() /
              fmt::format(".{}.{}.tmp", target_.filename().string(), getpid())) {
    file_ = Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file_.is_open()) fail("cannot create", path_);
    if (fchmod(file_.number(), mode) != 0) {
      const int error_number = errno;
      unlink(path_.c_str());
      errno = error_number;
      fail("cannot set the mode of", path_);
    }
  }
  ~Replacement() {
    if (!path_.empty()) unlink(path_.c_str());
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  void write(std::string_view text) {
    while (!text.empty()) {
      const ssize_t done = ::write(file_.number(), text.data(), text.size());
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail("cannot write", path_);
      text.remove_prefix(static_cast<std::size_t>(done));
    }
    if (fsync(file_.number()) != 0) fail("cannot sync", path_);
  }

  void take_over() {
    if (rename(path_.c_str(), target_.c_str()) != 0) fail("cannot replace", target_);
    path_.clear();
    const std::filesystem::path folder = target_.parent_path();
    const Descriptor directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory.is_open() || fsync(directory.number()) != 0) fail("cannot sync", folder);
  }

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  Descriptor file_;
};

}  // namespace

void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept) {
  const std::string text = edit_text(read_file(file), edits, file.string());
  const std::filesystem::path target = std::filesystem::canonical(file);
  struct stat status {};
  if (stat(target.c_str(), &status) != 0) fail("cannot look up", target);
  Replacement replacement(target, status.st_mode & 07777U);
  replacement.write(text);
  accept(parse(read_file(replacement.path()), std::filesystem::absolute(file).parent_path(),
               file.string(), {}));
  replacement.take_over();
}

}  // namespace ballast::config
