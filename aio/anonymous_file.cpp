#include "aio/anonymous_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast::aio {

namespace {

std::atomic<bool> named_files_are_forced = false;

}  // namespace

bool try_lock(const Descriptor& file) {
  while (flock(file.number(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

bool is_same_file(int directory, const char* name, const struct stat& status) {
  struct stat now {};
  return fstatat(directory, name, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_ino == status.st_ino &&
         now.st_dev == status.st_dev;
}

// Retries until the name still exists once the lock is held: a sweep between creation and lock may
// have taken the new file for that of a crashed run.
NamedFile create_named(const std::string& directory, int flags) {
  static std::atomic<unsigned> serial = 0;
  while (true) {
    std::string path = fmt::format("{}/{}{}-{}", directory, kSwapPrefix, getpid(), ++serial);
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
    const bool locked = try_lock(file);
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
    // Does not set O_EXCL, which would forbid File::link().
    Descriptor file(::open(directory.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC | flags, 0600));
    // Kernels and file systems without O_TMPFILE report these errors.
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

// Does not use posix_fallocate: where the file system has no fallocate, glibc writes single bytes,
// which O_DIRECT refuses.
int allocate_blocks(int descriptor, Bytes size, Bytes alignment, Bytes begin) {
  if (size == 0) return 0;
  while (fallocate(descriptor, 0, 0, static_cast<off_t>(size)) != 0) {
    if (errno == EOPNOTSUPP) return write_zeros(descriptor, size, alignment, begin);
    if (errno != EINTR) return errno;
  }
  return 0;
}

int write_zeros(int descriptor, Bytes size, Bytes alignment, Bytes begin) {
  const Bytes end = round_up(size, alignment);
  const Bytes chunk = round_up(std::min(end, 1 * kMiB), alignment);
  const auto granule = static_cast<std::align_val_t>(std::max<Bytes>(alignment, kPage));
  const auto release = [granule](std::byte* bytes) { operator delete[](bytes, granule); };
  const std::unique_ptr<std::byte[], decltype(release)> zeros(
      static_cast<std::byte*>(operator new[](chunk, granule)), release);
  std::memset(zeros.get(), 0, chunk);
  for (Bytes offset = begin; offset < end;) {
    const ssize_t written =
        pwrite(descriptor, zeros.get(), std::min(chunk, end - offset), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    const Bytes progress = static_cast<Bytes>(written) / alignment * alignment;
    if (progress == 0) return EIO;
    offset += progress;
  }
  while (ftruncate(descriptor, static_cast<off_t>(size)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace ballast::aio
