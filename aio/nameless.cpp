#include "aio/nameless.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string_view>

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::aio {
namespace {

constexpr std::string_view kPrefix = ".ballast-swap-";

std::atomic<bool> named_files_are_forced = false;

bool is_number(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// .ballast-swap-PID-N
bool is_swap_name(std::string_view name) {
  if (name.substr(0, kPrefix.size()) != kPrefix) return false;
  const std::string_view rest = name.substr(kPrefix.size());
  const std::size_t dash = rest.find('-');
  return dash != std::string_view::npos && is_number(rest.substr(0, dash)) &&
         is_number(rest.substr(dash + 1));
}

bool lock(const Descriptor& file) {
  while (flock(file.number(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

/// Whether `name` in `directory` is still the open file with `status`.
bool is_same_file(int directory, const char* name, const struct stat& status) {
  struct stat now {};
  return fstatat(directory, name, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_ino == status.st_ino &&
         now.st_dev == status.st_dev;
}

/// Removes `name` and adds it to `found` if it belongs to a crashed run of this user, whose lock is
/// free. The lock is held from the check to the unlink to exclude concurrent sweeps.
void sweep_one(int directory, const char* name, Leftovers& found) {
  const Descriptor file(
      openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!file.is_open()) return;
  struct stat status {};
  if (fstat(file.number(), &status) != 0) return;
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) return;
  if (!lock(file) || !is_same_file(directory, name, status)) return;
  if (unlinkat(directory, name, 0) != 0) return;
  constexpr Bytes kStatBlock = 512;
  ++found.files;
  found.bytes += static_cast<Bytes>(status.st_blocks) * kStatBlock;
}

}  // namespace

// A sweep between creation and lock may take the new file for that of a crashed run. So the file is
// used only if its name still exists once the lock is held; otherwise creation is retried.
NamedFile create_named(const std::string& directory, int flags) {
  static std::atomic<unsigned> serial = 0;
  while (true) {
    std::string path = fmt::format("{}/{}{}-{}", directory, kPrefix, getpid(), ++serial);
    Descriptor file(
        ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | flags, 0600));
    const int error_number = errno;
    if (!file.is_open()) {
      if (error_number == EEXIST) continue;
      // Some kernels create the file before they reject O_DIRECT.
      unlink(path.c_str());
      errno = error_number;
      return {};
    }
    const bool locked = lock(file);
    const bool busy = !locked && errno == EWOULDBLOCK;
    struct stat status {};
    const bool there = fstat(file.number(), &status) == 0 && status.st_nlink > 0;
    // On file systems without locks a sweep cannot lock the file either, so it leaves the file.
    if (there && !busy) return {std::move(file), std::move(path)};
    if (there) unlink(path.c_str());
  }
}

Descriptor open_nameless(const std::string& directory, int flags) {
  if (!named_files_are_forced) {
    // Without O_EXCL, which would forbid File::link().
    Descriptor file(::open(directory.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC | flags, 0600));
    // Errors of kernels and file systems without O_TMPFILE.
    const bool absent = errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT;
    if (file.is_open() || !absent) return file;
  }
  NamedFile named = create_named(directory, flags);
  if (named.descriptor.is_open()) {
    const int error_number = errno;
    unlink(named.path.c_str());
    errno = error_number;
  }
  return std::move(named.descriptor);
}

void force_named_files(bool forced) {
  named_files_are_forced = forced;
}

void forbid_copy_on_write(const Descriptor& file) {
  struct statfs found {};
  if (fstatfs(file.number(), &found) != 0) return;
  if (static_cast<std::uint32_t>(found.f_type) != BTRFS_SUPER_MAGIC) return;
  int attributes = 0;
  if (ioctl(file.number(), FS_IOC_GETFLAGS, &attributes) != 0) return;
  attributes |= FS_NOCOW_FL;
  if (ioctl(file.number(), FS_IOC_SETFLAGS, &attributes) != 0) {
    log(LogLevel::debug, "aio: cannot disable copy-on-write on btrfs; swapping will be slower");
  }
}

Leftovers remove_leftovers(const std::filesystem::path& directory) {
  Leftovers found;
  const auto close_directory = [](DIR* entries) { closedir(entries); };
  const std::unique_ptr<DIR, decltype(close_directory)> entries(opendir(directory.c_str()),
                                                                close_directory);
  if (!entries) return found;
  while (const dirent* entry = readdir(entries.get())) {
    if (is_swap_name(entry->d_name)) sweep_one(dirfd(entries.get()), entry->d_name, found);
  }
  if (found.files > 0) {
    log(LogLevel::info,
        fmt::format("aio: removed {} swap file{} ({}) of crashed runs from {}", found.files,
                    found.files == 1 ? "" : "s", format_bytes(found.bytes), directory.string()));
  }
  return found;
}

}  // namespace ballast::aio
