// A library for LD_PRELOAD that logs every call by which a process changes regular files and
// directories to the file BALLAST_TEST_RECORD. One call at a time: the log has the order in which
// the calls took effect. tests/e2e/power_cut.py reads it.
//
// It does not see calls that the C library makes itself, or io_uring, which must be switched off.

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum class Kind : std::uint32_t { create, write, resize, sync, rename, link, unlink, mkdir, end };

/// An inode; all zeros: none.
struct Inode {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
};

/// Header of each entry of the log. The names and the data follow it.
struct Header {
  Kind kind;
  std::uint32_t name_bytes;
  std::uint64_t new_name_bytes;
  std::uint64_t data_bytes;
  std::uint64_t offset;  ///< offset of a write, or the size after a resize
  Inode inode;           ///< the inode that is changed or gets a name
  Inode folder;          ///< folder of the name
  Inode new_folder;      ///< folder of the new name
};

/// An entry of a directory.
struct Entry {
  Inode folder;
  std::string name;
};

std::mutex& one_at_a_time() {
  static auto* const mutex = new std::mutex;  // outlives all static objects
  return *mutex;
}

/// The descriptor of the log; -1 if there is none.
int log_file() {
  static const int file = [] {
    const char* const path = std::getenv("BALLAST_TEST_RECORD");
    if (path == nullptr) return -1;
    return static_cast<int>(
        syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600));
  }();
  return file;
}

void append(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const long count = syscall(SYS_write, log_file(), bytes, size);
    if (count <= 0) std::abort();
    bytes += count;
    size -= static_cast<std::size_t>(count);
  }
}

void record(Kind kind, Inode inode, const Entry& entry = {}, const Entry& new_entry = {},
            std::string_view data = {}, std::uint64_t offset = 0) {
  if (log_file() < 0) return;
  const int error_number = errno;
  const Header header = {kind,
                         static_cast<std::uint32_t>(entry.name.size()),
                         new_entry.name.size(),
                         data.size(),
                         offset,
                         inode,
                         entry.folder,
                         new_entry.folder};
  append(&header, sizeof header);
  append(entry.name.data(), entry.name.size());
  append(new_entry.name.data(), new_entry.name.size());
  append(data.data(), data.size());
  errno = error_number;
}

Inode inode_of(const struct stat& status) {
  return {status.st_dev, status.st_ino};
}

Inode inode_at(int directory, const std::string& path, int flags = AT_SYMLINK_NOFOLLOW) {
  const int error_number = errno;
  struct stat status {};
  const bool there = fstatat(directory, path.c_str(), &status, flags) == 0;
  errno = error_number;
  return there ? inode_of(status) : Inode{};
}

Entry entry_at(int directory, std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const auto slash = path.rfind('/');
  if (slash == std::string_view::npos) return {inode_at(directory, "."), std::string(path)};
  return {inode_at(directory, std::string(path.substr(0, slash + 1)), 0),
          std::string(path.substr(slash + 1))};
}

/// The size of an open regular file; false for everything else.
bool regular(int file, struct stat& status) {
  const int error_number = errno;
  const bool found = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  errno = error_number;
  return found;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int recorded_open(int directory, const char* path, int flags, unsigned mode) {
  const std::lock_guard lock(one_at_a_time());
  static auto* const call = real<int(int, const char*, int, ...)>("openat");
  const bool nameless = (flags & O_TMPFILE) == O_TMPFILE;
  const bool existed = inode_at(directory, path, 0).number != 0;
  const int file = call(directory, path, flags, mode);
  struct stat status {};
  if (file < 0 || !regular(file, status)) return file;
  if (nameless) {
    record(Kind::create, inode_of(status), {inode_at(directory, path, 0), ""});
  } else if (!existed) {
    record(Kind::create, inode_of(status), entry_at(directory, path));
  } else if ((flags & O_TRUNC) != 0) {
    record(Kind::resize, inode_of(status));
  }
  return file;
}

void record_write(int file, const void* data, ssize_t count, off_t offset) {
  struct stat status {};
  if (count <= 0 || !regular(file, status)) return;
  const std::string_view bytes(static_cast<const char*>(data), static_cast<std::size_t>(count));
  record(Kind::write, inode_of(status), {}, {}, bytes, static_cast<std::uint64_t>(offset));
}

ssize_t recorded_write(int file, const void* data, size_t size) {
  const std::lock_guard lock(one_at_a_time());
  static auto* const call = real<ssize_t(int, const void*, size_t)>("write");
  const ssize_t count = call(file, data, size);
  const int error_number = errno;
  record_write(file, data, count, lseek(file, 0, SEEK_CUR) - count);
  errno = error_number;
  return count;
}

ssize_t recorded_writev(int file, const iovec* parts, int number) {
  ssize_t sum = 0;
  for (int i = 0; i < number; ++i) {
    const ssize_t count = recorded_write(file, parts[i].iov_base, parts[i].iov_len);
    if (count < 0) return sum > 0 ? sum : count;
    sum += count;
    if (static_cast<size_t>(count) < parts[i].iov_len) break;
  }
  return sum;
}

ssize_t recorded_pwrite(int file, const void* data, size_t size, off_t offset) {
  const std::lock_guard lock(one_at_a_time());
  static auto* const call = real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  const ssize_t count = call(file, data, size, offset);
  record_write(file, data, count, offset);
  return count;
}

int recorded_resize(int file, int result) {
  struct stat status {};
  if (result == 0 && regular(file, status)) {
    record(Kind::resize, inode_of(status), {}, {}, {}, static_cast<std::uint64_t>(status.st_size));
  }
  return result;
}

int recorded_truncate(int file, off_t size) {
  const std::lock_guard lock(one_at_a_time());
  static auto* const call = real<int(int, off_t)>("ftruncate");
  return recorded_resize(file, call(file, size));
}

int recorded_allocate(int file, int mode, off_t offset, off_t size) {
  const std::lock_guard lock(one_at_a_time());
  static auto* const call = real<int(int, int, off_t, off_t)>("fallocate");
  return recorded_resize(file, call(file, mode, offset, size));
}

int recorded_sync(const char* name, int file) {
  const std::lock_guard lock(one_at_a_time());
  const int result = real<int(int)>(name)(file);
  const int error_number = errno;
  struct stat status {};
  if (result == 0 && fstat(file, &status) == 0) record(Kind::sync, inode_of(status));
  errno = error_number;
  return result;
}

/// Logs that `call()` gives the file at `path` the name `to`, in addition or instead.
template <class Call>
int recorded_naming(Kind kind, int directory, const char* path, int new_directory, const char* to,
                    Call&& call) {
  const std::lock_guard lock(one_at_a_time());
  const int result = call();
  if (result != 0) return result;
  const Entry old = kind == Kind::rename ? entry_at(directory, path) : Entry{};
  record(kind, inode_at(new_directory, to), old, entry_at(new_directory, to));
  return result;
}

template <class Call>
int recorded_unlinking(int directory, const char* path, Call&& call) {
  const std::lock_guard lock(one_at_a_time());
  const Inode inode = inode_at(directory, path);
  const int result = call();
  if (result == 0) record(Kind::unlink, inode, entry_at(directory, path));
  return result;
}

template <class Call>
int recorded_mkdir(int directory, const char* path, Call&& call) {
  const std::lock_guard lock(one_at_a_time());
  const int result = call();
  if (result == 0) record(Kind::mkdir, inode_at(directory, path), entry_at(directory, path));
  return result;
}

/// Logs the end of a process.
[[gnu::destructor]] void record_end() {
  const std::lock_guard lock(one_at_a_time());
  record(Kind::end, {});
}

}  // namespace

// The labels give these functions the names of the C library's, whose declarations differ in
// attributes.
extern "C" {
#pragma GCC visibility push(default)

int ballast_open(const char* path, int flags, unsigned mode) __asm__("open");
int ballast_open(const char* path, int flags, unsigned mode) {
  return recorded_open(AT_FDCWD, path, flags, mode);
}
int ballast_open64(const char* path, int flags, unsigned mode) __asm__("open64");
int ballast_open64(const char* path, int flags, unsigned mode) {
  return recorded_open(AT_FDCWD, path, flags, mode);
}
int ballast_openat(int directory, const char* path, int flags, unsigned mode) __asm__("openat");
int ballast_openat(int directory, const char* path, int flags, unsigned mode) {
  return recorded_open(directory, path, flags, mode);
}
int ballast_openat64(int directory, const char* path, int flags, unsigned mode) __asm__("openat64");
int ballast_openat64(int directory, const char* path, int flags, unsigned mode) {
  return recorded_open(directory, path, flags, mode);
}
ssize_t ballast_write(int file, const void* data, size_t size) __asm__("write");
ssize_t ballast_write(int file, const void* data, size_t size) {
  return recorded_write(file, data, size);
}
ssize_t ballast_writev(int file, const iovec* parts, int number) __asm__("writev");
ssize_t ballast_writev(int file, const iovec* parts, int number) {
  return recorded_writev(file, parts, number);
}
ssize_t ballast_pwrite(int file, const void* data, size_t size, off_t offset) __asm__("pwrite");
ssize_t ballast_pwrite(int file, const void* data, size_t size, off_t offset) {
  return recorded_pwrite(file, data, size, offset);
}
ssize_t ballast_pwrite64(int file, const void* data, size_t size, off_t offset) __asm__("pwrite64");
ssize_t ballast_pwrite64(int file, const void* data, size_t size, off_t offset) {
  return recorded_pwrite(file, data, size, offset);
}
int ballast_ftruncate(int file, off_t size) __asm__("ftruncate");
int ballast_ftruncate(int file, off_t size) {
  return recorded_truncate(file, size);
}
int ballast_ftruncate64(int file, off_t size) __asm__("ftruncate64");
int ballast_ftruncate64(int file, off_t size) {
  return recorded_truncate(file, size);
}
int ballast_fallocate(int file, int mode, off_t offset, off_t size) __asm__("fallocate");
int ballast_fallocate(int file, int mode, off_t offset, off_t size) {
  return recorded_allocate(file, mode, offset, size);
}
int ballast_fallocate64(int file, int mode, off_t offset, off_t size) __asm__("fallocate64");
int ballast_fallocate64(int file, int mode, off_t offset, off_t size) {
  return recorded_allocate(file, mode, offset, size);
}
int ballast_fsync(int file) __asm__("fsync");
int ballast_fsync(int file) {
  return recorded_sync("fsync", file);
}
int ballast_fdatasync(int file) __asm__("fdatasync");
int ballast_fdatasync(int file) {
  return recorded_sync("fdatasync", file);
}
int ballast_rename(const char* from, const char* to) __asm__("rename");
int ballast_rename(const char* from, const char* to) {
  static auto* const call = real<int(const char*, const char*)>("rename");
  return recorded_naming(Kind::rename, AT_FDCWD, from, AT_FDCWD, to,
                         [&] { return call(from, to); });
}
int ballast_link(const char* from, const char* to) __asm__("link");
int ballast_link(const char* from, const char* to) {
  static auto* const call = real<int(const char*, const char*)>("link");
  return recorded_naming(Kind::link, AT_FDCWD, from, AT_FDCWD, to, [&] { return call(from, to); });
}
int ballast_linkat(int directory, const char* from, int new_directory, const char* to,
                   int flags) __asm__("linkat");
int ballast_linkat(int directory, const char* from, int new_directory, const char* to, int flags) {
  static auto* const call = real<int(int, const char*, int, const char*, int)>("linkat");
  return recorded_naming(Kind::link, directory, from, new_directory, to,
                         [&] { return call(directory, from, new_directory, to, flags); });
}
int ballast_unlink(const char* path) __asm__("unlink");
int ballast_unlink(const char* path) {
  static auto* const call = real<int(const char*)>("unlink");
  return recorded_unlinking(AT_FDCWD, path, [&] { return call(path); });
}
int ballast_remove(const char* path) __asm__("remove");
int ballast_remove(const char* path) {
  static auto* const call = real<int(const char*)>("remove");
  return recorded_unlinking(AT_FDCWD, path, [&] { return call(path); });
}
int ballast_rmdir(const char* path) __asm__("rmdir");
int ballast_rmdir(const char* path) {
  static auto* const call = real<int(const char*)>("rmdir");
  return recorded_unlinking(AT_FDCWD, path, [&] { return call(path); });
}
int ballast_unlinkat(int directory, const char* path, int flags) __asm__("unlinkat");
int ballast_unlinkat(int directory, const char* path, int flags) {
  static auto* const call = real<int(int, const char*, int)>("unlinkat");
  return recorded_unlinking(directory, path, [&] { return call(directory, path, flags); });
}
int ballast_mkdir(const char* path, mode_t mode) __asm__("mkdir");
int ballast_mkdir(const char* path, mode_t mode) {
  static auto* const call = real<int(const char*, mode_t)>("mkdir");
  return recorded_mkdir(AT_FDCWD, path, [&] { return call(path, mode); });
}
int ballast_mkdirat(int directory, const char* path, mode_t mode) __asm__("mkdirat");
int ballast_mkdirat(int directory, const char* path, mode_t mode) {
  static auto* const call = real<int(int, const char*, mode_t)>("mkdirat");
  return recorded_mkdir(directory, path, [&] { return call(directory, path, mode); });
}

#pragma GCC visibility pop
}  // extern "C"
