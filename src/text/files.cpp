#include "ballast/text/files.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

namespace ballast::text {
namespace {

// Linux transfers at most 2 GiB less a page per call.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;

constexpr std::string_view kTemporary = ".tmp-";
/// Numbers of processes are smaller.
constexpr std::uint64_t kPids = std::uint64_t{1} << 22U;

/// Appends to the name, which is shortened if it would be too long for a file.
std::filesystem::path with_suffix(const std::filesystem::path& path, std::string_view suffix) {
  constexpr std::size_t kLongestName = 255;  // bytes (NAME_MAX)
  std::string name = path.filename().string();
  if (name.size() <= kLongestName) name.resize(std::min(name.size(), kLongestName - suffix.size()));
  return path.parent_path() / name.append(suffix);
}

/// Returns whether a process has locked the file at `path`. Another container may have a process
/// with the same number.
bool is_in_use(const std::filesystem::path& path) {
  const Descriptor file(
      ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  return file.is_open() && ::flock(file.number(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

/// Creates a new file at `path` and locks it. Removes what a killed process with the same number
/// has left. None if a process with the same number uses it. Follows no symbolic link.
Descriptor create_temporary(const std::filesystem::path& path, unsigned mode) {
  if (is_in_use(path)) return {};
  ::unlink(path.c_str());
  Descriptor file = open_file(path, O_WRONLY | O_CREAT | O_EXCL, ErrorCategory::io, mode);
  struct stat status = {};
  while (::flock(file.number(), LOCK_EX | LOCK_NB) != 0 && errno == EINTR) {
  }
  const bool there = ::fstat(file.number(), &status) == 0 && status.st_nlink > 0;
  return there ? std::move(file) : Descriptor();
}

/// Whether a rename cannot replace the file at `path`, which is in a folder like /tmp (sticky bit)
/// and belongs to another user.
bool is_of_another_user(const std::filesystem::path& path) {
  struct stat file = {};
  struct stat folder = {};
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  if (::lstat(path.c_str(), &file) != 0 || ::stat(parent.c_str(), &folder) != 0) return false;
  const uid_t own = ::geteuid();
  return own != 0 && (folder.st_mode & S_ISVTX) != 0 && file.st_uid != own && folder.st_uid != own;
}

/// Some folders cannot be opened for reading, but have their new name all the same.
void sync_name_if_readable(const std::filesystem::path& path) {
  try {
    sync_name(path);
  } catch (const Error& error) {
    if (error.error_number() != EACCES && error.error_number() != EPERM) throw;
    log(LogLevel::debug, error.what());
  }
}

/// Runs `action`; errors name `path` instead of the temporary file.
template <class Action>
auto naming(const std::filesystem::path& path, Action&& action) {
  try {
    return action();
  } catch (const Error& error) {
    throw Error(ErrorCategory::io, fmt::format("cannot write {}", path.string()),
                error.error_number());
  }
}

}  // namespace

std::filesystem::path temporary_of(const std::filesystem::path& path) {
  return with_suffix(path, fmt::format("{}{}", kTemporary, ::getpid()));
}

std::vector<std::filesystem::path> unfinished_of(const std::filesystem::path& path) {
  std::vector<std::filesystem::path> found;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::size_t suffix = name.rfind(kTemporary);
    if (suffix == std::string::npos) continue;
    const std::string number = name.substr(suffix + kTemporary.size());
    const bool is_number =
        !number.empty() && number.find_first_not_of("0123456789") == std::string::npos;
    if (is_number && with_suffix(path, name.substr(suffix)).filename() == name) {
      found.push_back(entry->path());
    }
  }
  return found;
}

Descriptor open_file(const std::filesystem::path& path, int flags, ErrorCategory category,
                     unsigned mode) {
  while (true) {
    const int number = ::open(path.c_str(), flags | O_CLOEXEC, mode);
    if (number >= 0) return Descriptor(number);
    if (errno != EINTR) {
      const int error_number = errno;
      throw Error(category, fmt::format("cannot open {}", path.string()), error_number);
    }
  }
}

Bytes regular_file_size(const Descriptor& file, const std::filesystem::path& path,
                        ErrorCategory category) {
  struct stat status = {};
  if (::fstat(file.number(), &status) != 0) {
    const int error_number = errno;
    throw Error(category, fmt::format("cannot get the size of {}", path.string()), error_number);
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(category, fmt::format("{} is not a regular file", path.string()));
  }
  return static_cast<Bytes>(status.st_size);
}

void read_fully(const Descriptor& file, const std::filesystem::path& path, Bytes offset,
                std::span<std::byte> out) {
  while (!out.empty()) {
    const auto count = ::pread(file.number(), out.data(), std::min(out.size(), kLargestTransfer),
                               static_cast<off_t>(offset));
    if (count < 0) {
      if (errno == EINTR) continue;
      const int error_number = errno;
      throw Error(
          ErrorCategory::io,
          fmt::format("cannot read {} bytes at offset {} of {}", out.size(), offset, path.string()),
          error_number);
    }
    if (count == 0) {
      throw Error(ErrorCategory::data, fmt::format("{} ends at offset {}, {} bytes too early: it "
                                                   "is truncated or was changed while in use",
                                                   path.string(), offset, out.size()));
    }
    offset += static_cast<Bytes>(count);
    out = out.subspan(static_cast<std::size_t>(count));
  }
}

void write_fully(const Descriptor& file, const std::filesystem::path& path,
                 std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count =
        ::write(file.number(), bytes.data(), std::min(bytes.size(), kLargestTransfer));
    if (count < 0) {
      if (errno == EINTR) continue;
      const int error_number = errno;
      throw Error(ErrorCategory::io,
                  fmt::format("cannot write {} bytes to {}", bytes.size(), path.string()),
                  error_number);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void sync_file(const Descriptor& file, const std::filesystem::path& path) {
  if (::fsync(file.number()) != 0) {
    const int error_number = errno;
    throw Error(ErrorCategory::io, fmt::format("cannot flush {} to disk", path.string()),
                error_number);
  }
}

void sync_folder(const std::filesystem::path& folder) {
  sync_file(open_file(folder, O_RDONLY | O_DIRECTORY, ErrorCategory::io), folder);
}

void sync_name(const std::filesystem::path& path) {
  sync_folder(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."));
}

void try_to_sync_name(const std::filesystem::path& path) {
  try {
    sync_name(path);
  } catch (const std::exception& error) {
    log(LogLevel::debug, error.what());
  }
}

bool make_separate(const std::filesystem::path& path) {
  struct stat own = {};
  struct stat target = {};
  if (::lstat(path.c_str(), &own) != 0 || ::stat(path.c_str(), &target) != 0) return false;
  const bool shared = S_ISLNK(own.st_mode) || own.st_nlink > 1;
  if (!shared || !S_ISREG(target.st_mode)) return false;
  const Descriptor file = open_file(path, O_RDONLY, ErrorCategory::io);
  ReplacedFile copy(path);
  std::vector<std::byte> part(std::size_t{1} << 20);
  const Bytes size = regular_file_size(file, path, ErrorCategory::io);
  for (Bytes at = 0; at < size; at += part.size()) {
    part.resize(std::min<Bytes>(part.size(), size - at));
    read_fully(file, path, at, part);
    copy.write(part);
  }
  copy.commit();
  return true;
}

std::string read_settings(const std::filesystem::path& path, std::string_view kind) {
  constexpr Bytes kLongest = kMiB;
  const auto refuse = [&](const std::string& reason, int error_number = 0) {
    const std::string message = printable(path.string(), 4096) + ": " + reason;
    if (error_number == 0) throw Error(ErrorCategory::config, message);
    throw Error(ErrorCategory::config, message, error_number);
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    refuse(fmt::format("is a directory; give a {} file", kind));
  }
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) refuse(fmt::format("cannot open the {}", kind), errno);
  std::string text(kLongest + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) refuse(fmt::format("cannot read the {}", kind), errno);
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kLongest) refuse(fmt::format("too long for a {} file: above 1 MiB", kind));
  if (text.starts_with("version https://git-lfs")) {
    refuse("is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder");
  }
  return text;
}

AppendedFile::AppendedFile(std::filesystem::path path, int flags)
    : path_(std::move(path)),
      descriptor_(open_file(path_, flags | O_WRONLY | O_CREAT | O_APPEND, ErrorCategory::io)) {}

void AppendedFile::append(std::string_view record) {
  try {
    write_fully(descriptor_, path_, std::as_bytes(std::span(record)));
  } catch (const Error&) {
    // Reports the write error, not an error of the truncation.
    [[maybe_unused]] const int result =
        ::ftruncate(descriptor_.number(), static_cast<off_t>(size_));
    throw;
  }
  size_ += record.size();
}

void AppendedFile::cut(Bytes size) {
  struct stat status = {};
  const bool known = ::fstat(descriptor_.number(), &status) == 0;
  size_ = known ? std::min(size, static_cast<Bytes>(status.st_size)) : size;
  if (known && size_ == static_cast<Bytes>(status.st_size)) return;
  if (::ftruncate(descriptor_.number(), static_cast<off_t>(size_)) == 0) return;
  const int error_number = errno;
  throw Error(ErrorCategory::io, fmt::format("cannot shorten {}", path_.string()), error_number);
}

ReplacedFile::ReplacedFile(std::filesystem::path path)
    : path_(std::move(path)), temporary_(temporary_of(path_)) {
  const auto refuse = [&](std::string_view reason) {
    throw Error(ErrorCategory::io, fmt::format("cannot write {}: {}", path_.string(), reason));
  };
  if (path_.filename().empty()) refuse("the path names a directory");
  struct stat old = {};
  const bool exists = ::stat(path_.c_str(), &old) == 0;
  // A rename would replace a device with a file, and cannot replace a directory.
  if (exists && !S_ISREG(old.st_mode)) refuse("exists but is not a regular file");
  if (is_of_another_user(path_)) refuse("it belongs to another user, who alone may replace it");
  constexpr unsigned kPermissions = 07777;
  naming(path_, [&] {
    const unsigned mode = exists ? old.st_mode & kPermissions : 0666;
    for (std::uint64_t time = 0; !descriptor_.is_open(); ++time) {
      temporary_ = with_suffix(path_, fmt::format("{}{}", kTemporary, ::getpid() + time * kPids));
      descriptor_ = create_temporary(temporary_, mode);
    }
  });
  // Restores mode bits that the umask cleared.
  if (exists && ::fchmod(descriptor_.number(), old.st_mode & kPermissions) != 0) {
    const int error_number = errno;
    ::unlink(temporary_.c_str());
    throw Error(ErrorCategory::io, fmt::format("cannot set the mode of {}", temporary_.string()),
                error_number);
  }
}

ReplacedFile::~ReplacedFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void ReplacedFile::reserve(Bytes size) {
  if (size == 0) return;
  int result = 0;
  do {
    result = ::fallocate(descriptor_.number(), 0, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
    result = ::ftruncate(descriptor_.number(), static_cast<off_t>(size));
  }
  if (result == 0) return;
  const int error_number = errno;
  throw Error(ErrorCategory::io, fmt::format("cannot write {}", path_.string()), error_number);
}

void ReplacedFile::write_at(Bytes offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count =
        ::pwrite(descriptor_.number(), bytes.data(), std::min(bytes.size(), kLargestTransfer),
                 static_cast<off_t>(offset));
    if (count < 0) {
      const int error_number = errno;
      if (error_number == EINTR) continue;
      throw Error(ErrorCategory::io, fmt::format("cannot write {}", path_.string()), error_number);
    }
    offset += static_cast<Bytes>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void ReplacedFile::write(std::span<const std::byte> bytes) {
  naming(path_, [&] { write_fully(descriptor_, temporary_, bytes); });
}

void ReplacedFile::commit() {
  commit(0);
}

void ReplacedFile::commit_as_new() {
  commit(RENAME_NOREPLACE);
}

void ReplacedFile::commit(unsigned flags) {
  naming(path_, [&] { sync_file(descriptor_, temporary_); });
  const char* const from = temporary_.c_str();
  int result = flags == 0 ? std::rename(from, path_.c_str())
                          : ::renameat2(AT_FDCWD, from, AT_FDCWD, path_.c_str(), flags);
  // Some file systems have no flags.
  if (result != 0 && flags != 0 && (errno == EINVAL || errno == ENOSYS)) {
    result = std::rename(from, path_.c_str());
  }
  if (result != 0) {
    const int error_number = errno;
    throw Error(ErrorCategory::io, fmt::format("cannot write {}", path_.string()), error_number);
  }
  committed_ = true;
  sync_name_if_readable(path_);
}

}  // namespace ballast::text
