#include "ballast/aio/file.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "aio/anonymous_file.h"

namespace ballast::aio {

namespace {

using Kind = FileSystem::Kind;

struct KnownFileSystem {
  std::uint32_t magic;
  Kind kind;
  std::string_view type;
};

// Numbers that are not in linux/magic.h (6.1) come from the file systems' own sources, under fs/ of
// the kernel unless noted otherwise.
constexpr std::array kKnown = {
    KnownFileSystem{EXT4_SUPER_MAGIC, Kind::disk, "ext4"},  // ext2 and ext3 have the same number
    KnownFileSystem{XFS_SUPER_MAGIC, Kind::disk, "xfs"},
    KnownFileSystem{BTRFS_SUPER_MAGIC, Kind::disk, "btrfs"},
    KnownFileSystem{F2FS_SUPER_MAGIC, Kind::disk, "f2fs"},
    KnownFileSystem{0x2fc12fc1, Kind::disk, "zfs"},       // OpenZFS, include/sys/fs/zfs.h
    KnownFileSystem{0xca451a4e, Kind::disk, "bcachefs"},  // bcachefs/bcachefs_format.h
    KnownFileSystem{0x3153464a, Kind::disk, "jfs"},       // jfs/jfs_superblock.h
    KnownFileSystem{0x5346544e, Kind::disk, "ntfs"},      // ntfs/ntfs.h
    KnownFileSystem{0x7366746e, Kind::disk, "ntfs3"},     // ntfs3/super.c
    KnownFileSystem{EXFAT_SUPER_MAGIC, Kind::disk, "exfat"},
    KnownFileSystem{MSDOS_SUPER_MAGIC, Kind::disk, "vfat"},
    KnownFileSystem{NILFS_SUPER_MAGIC, Kind::disk, "nilfs2"},
    KnownFileSystem{REISERFS_SUPER_MAGIC, Kind::disk, "reiserfs"},
    KnownFileSystem{OCFS2_SUPER_MAGIC, Kind::disk, "ocfs2"},
    KnownFileSystem{0x01161970, Kind::disk, "gfs2"},  // uapi/linux/gfs2_ondisk.h
    KnownFileSystem{TMPFS_MAGIC, Kind::memory, "tmpfs"},
    KnownFileSystem{RAMFS_MAGIC, Kind::memory, "ramfs"},
    KnownFileSystem{HUGETLBFS_MAGIC, Kind::memory, "hugetlbfs"},
    KnownFileSystem{OVERLAYFS_SUPER_MAGIC, Kind::overlay, "overlay"},
    KnownFileSystem{0x61756673, Kind::overlay, "aufs"},  // aufs, include/uapi/linux/aufs_type.h
    KnownFileSystem{ECRYPTFS_SUPER_MAGIC, Kind::overlay, "ecryptfs"},
    KnownFileSystem{NFS_SUPER_MAGIC, Kind::network, "nfs"},
    KnownFileSystem{SMB_SUPER_MAGIC, Kind::network, "smb"},
    KnownFileSystem{CIFS_SUPER_MAGIC, Kind::network, "cifs"},
    KnownFileSystem{SMB2_SUPER_MAGIC, Kind::network, "smb2"},
    KnownFileSystem{CEPH_SUPER_MAGIC, Kind::network, "ceph"},
    KnownFileSystem{FUSE_SUPER_MAGIC, Kind::network, "fuse"},  // virtiofs too
    KnownFileSystem{V9FS_MAGIC, Kind::network, "9p"},
    KnownFileSystem{AFS_SUPER_MAGIC, Kind::network, "afs"},
    KnownFileSystem{AFS_FS_MAGIC, Kind::network, "afs"},
    KnownFileSystem{CODA_SUPER_MAGIC, Kind::network, "coda"},
    KnownFileSystem{0x786f4256, Kind::network, "vboxsf"},  // vboxsf/super.c
    KnownFileSystem{0x0bd00bd0, Kind::network, "lustre"},  // coreutils, src/stat.c
    KnownFileSystem{0x47504653, Kind::network, "gpfs"},    // coreutils, src/stat.c
    KnownFileSystem{0x19830326, Kind::network, "beegfs"},  // BeeGFS, client_module FhgfsOpsSuper.h
    KnownFileSystem{0xaad7aaea, Kind::network, "panfs"},   // coreutils, src/stat.c
};

Error no_directory(const std::string& place, int error_number) {
  if (error_number == ENOENT || error_number == ENOTDIR) {
    return {ErrorCategory::io, place + ": no such directory; create it or choose another"};
  }
  return {ErrorCategory::io, place + ": cannot read the directory's status", error_number};
}

}  // namespace

FileSystem inspect_file_system(const std::filesystem::path& directory) {
  const std::string place = directory.string();
  struct stat status {};
  if (stat(place.c_str(), &status) != 0) throw no_directory(place, errno);
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCategory::io, place + " is not a directory; choose one", ENOTDIR);
  }
  struct statfs found {};
  if (statfs(place.c_str(), &found) != 0) throw no_directory(place, errno);
  // f_type is signed and wider than 32 bits on some machines.
  const auto magic = static_cast<std::uint32_t>(found.f_type);
  FileSystem result;
  result.device = status.st_dev;
  const auto* known = std::find_if(kKnown.begin(), kKnown.end(), [&](const KnownFileSystem& entry) {
    return entry.magic == magic;
  });
  if (known != kKnown.end()) {
    result.kind = known->kind;
    result.type = known->type;
  } else {
    result.type = fmt::format("{:#x}", magic);
  }
  struct statvfs space {};
  if (statvfs(place.c_str(), &space) == 0 && space.f_blocks > 0) {
    result.free = Bytes{space.f_bavail} * space.f_frsize;
  }
  return result;
}

std::string unsuited_for_swap(const FileSystem& file_system,
                              const std::filesystem::path& directory) {
  const auto because = [&](std::string_view article, std::string_view why) {
    return fmt::format("{} is on {} {} file system: {}", directory.string(), article,
                       file_system.type, why);
  };
  switch (file_system.kind) {
    case Kind::disk:
      return "";
    case Kind::memory:
      return because("a", "its files are in memory, so swapping to it saves no memory");
    case Kind::overlay:
      return because("an", "container layers are slow to write and deleted with the container");
    case Kind::network:
      return because("a", "it depends on another machine or process, which is slow and unreliable");
  }
  return "";
}

namespace {

bool is_number(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// Whether `name` has the form .ballast-swap-PID-N.
bool is_swap_name(std::string_view name) {
  if (name.substr(0, kSwapPrefix.size()) != kSwapPrefix) return false;
  const std::string_view rest = name.substr(kSwapPrefix.size());
  const std::size_t dash = rest.find('-');
  return dash != std::string_view::npos && is_number(rest.substr(0, dash)) &&
         is_number(rest.substr(dash + 1));
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
  if (!try_lock(file) || !is_same_file(directory, name, status)) return;
  if (unlinkat(directory, name, 0) != 0) return;
  constexpr Bytes kStatBlock = 512;
  ++found.files;
  found.bytes += static_cast<Bytes>(status.st_blocks) * kStatBlock;
}

}  // namespace

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

namespace {

Error no_direct_io(const std::string& place) {
  return {ErrorCategory::io,
          place +
              ": the file system has no direct I/O (O_DIRECT); choose a path on another one, "
              "such as ext4 or xfs on a local disk"};
}

Error file_too_large(const std::string& place, Bytes size, std::string_view limit) {
  return {ErrorCategory::io,
          fmt::format("{}: a file of {} ({} bytes) is above {}", place, format_bytes(size), size,
                      limit),
          EFBIG};
}

/// Checks the file-size limit, which would raise SIGXFSZ later.
void require_size_limit(const std::string& place, Bytes size) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (size <= limit.rlim_cur) return;
  throw file_too_large(place, size,
                       fmt::format("the file-size limit of {} bytes; raise it with 'ulimit -f "
                                   "unlimited'",
                                   limit.rlim_cur));
}

Error not_enough_space(const std::string& place, Bytes size, Bytes available) {
  return {
      ErrorCategory::io,
      fmt::format("{}: needs {} ({} bytes), but only {} ({} bytes) are free; free space or choose "
                  "another path",
                  place, format_bytes(size), size, format_bytes(available), available),
      ENOSPC};
}

/// Allocation failed although enough space was free before.
Error space_ran_out(const std::string& place, Bytes size, std::optional<Bytes> before,
                    int error_number) {
  return {ErrorCategory::io,
          fmt::format("{}: cannot allocate {} ({} bytes) although {} were free: a quota or another "
                      "program prevents it; choose another path",
                      place, format_bytes(size), size,
                      before ? format_bytes(*before) : "an unknown number of bytes"),
          error_number};
}

void warn_of_buffering(const std::string& place) {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  log(LogLevel::warning, fmt::format("aio: I/O to {} goes through the page cache, which is "
                                     "slower than direct I/O and takes memory",
                                     place));
}

Descriptor open_anonymous(const std::string& place, bool direct) {
  Descriptor file = open_nameless(place, direct ? O_DIRECT : 0);
  if (file.is_open()) return file;
  const int error_number = errno;
  if (direct && error_number == EINVAL) throw no_direct_io(place);
  if (error_number == EACCES || error_number == EPERM || error_number == EROFS) {
    throw Error(ErrorCategory::io,
                place + ": the directory is not writable; choose another or change its permissions",
                error_number);
  }
  throw Error(ErrorCategory::io, place + ": cannot create a file here; choose another directory",
              error_number);
}

Bytes direct_alignment(const Descriptor& file, const std::string& place) {
  struct statx status {};
  if (statx(file.number(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0 ||
      (status.stx_mask & STATX_DIOALIGN) == 0) {
    return kPage;
  }
  if (status.stx_dio_offset_align == 0) throw no_direct_io(place);
  return std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
}

/// An empty nameless file, the free space before it was made, and its alignment.
struct Anonymous {
  Descriptor file;
  std::optional<Bytes> free;
  Bytes alignment = 1;
};

Anonymous start_anonymous(const std::filesystem::path& directory, Bytes size, bool direct) {
  const std::string place = directory.string();
  static_cast<void>(inspect_file_system(directory));  // throws if it is not a directory
  require_size_limit(place, size);
  static_cast<void>(remove_leftovers(directory));
  const std::optional<Bytes> free = inspect_file_system(directory).free;
  if (free && size > *free) throw not_enough_space(place, size, *free);
  Anonymous result{open_anonymous(place, direct), free, 1};
  if (direct) result.alignment = direct_alignment(result.file, place);
  return result;
}

/// Locks a swap file. The kernel may free the lock of a killed process, or of one that has
/// io_uring, some time after its end.
void lock_swap(const Descriptor& file, const std::string& place) {
  constexpr auto kPatience = std::chrono::seconds(10);
  constexpr auto kPause = std::chrono::milliseconds(10);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!try_lock(file)) {
    if (errno != EWOULDBLOCK) return;  // the file system has no locks
    if (std::chrono::steady_clock::now() >= end) {
      throw Error(
          ErrorCategory::io,
          place + ": another process uses the swap file of this run; end that process first");
    }
    std::this_thread::sleep_for(kPause);
  }
}

void sync_name(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.parent_path();
  const char* const place = folder.empty() ? "." : folder.c_str();
  const Descriptor file(::open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.is_open() && fsync(file.number()) == 0) return;
  throw Error(ErrorCategory::io, fmt::format("cannot flush {} to disk", place), errno);
}

}  // namespace

File::File(Descriptor descriptor, std::string name, Bytes size, Bytes alignment)
    : descriptor_(std::move(descriptor)),
      name_(std::move(name)),
      size_(size),
      alignment_(alignment) {}

/// A registration with io_uring may keep the open file, and thereby its lock, for some time.
File::~File() {
  if (descriptor_.is_open()) flock(descriptor_.number(), LOCK_UN);
}

void File::check_anonymous(const std::filesystem::path& directory, Bytes size, Access access) {
  static_cast<void>(start_anonymous(directory, size, access == Access::direct));
}

File File::create_anonymous(const std::filesystem::path& directory, Bytes size, Access access) {
  const std::string place = directory.string();
  auto [file, free, alignment] = start_anonymous(directory, size, access == Access::direct);
  if (access == Access::buffered) warn_of_buffering(place);
  static_cast<void>(try_lock(file));  // nobody else knows the file
  forbid_copy_on_write(file);
  switch (const int error_number = allocate_blocks(file.number(), size, alignment)) {
    case 0:
      return {std::move(file), place, size, alignment};
    case ENOSPC:
    case EDQUOT:
      throw space_ran_out(place, size, free, error_number);
    case EFBIG:
      throw file_too_large(place, size,
                           "the file system's limit; choose a path on another file system");
    default:
      throw Error(ErrorCategory::io,
                  fmt::format("{}: cannot allocate {}", place, format_bytes(size)), error_number);
  }
}

File File::create_in_memory(Bytes size) {
  const std::string place = "memory";
  require_size_limit(place, size);
  Descriptor file(memfd_create("ballast", MFD_CLOEXEC));
  if (!file.is_open() || ftruncate(file.number(), static_cast<off_t>(size)) != 0) {
    throw Error(ErrorCategory::io,
                fmt::format("cannot make a file of {} in memory", format_bytes(size)), errno);
  }
  return {std::move(file), place, size, 1};
}

File File::open(const std::filesystem::path& path, bool writable, Access access) {
  return open_as(path.string(), path.string(), writable, access);
}

File File::open_swap(const std::filesystem::path& path, const std::filesystem::path& directory,
                     Bytes size, Access access) {
  File file = open_as(path.string(), directory.string(), true, access);
  lock_swap(file.descriptor_, file.name());
  if (file.size() >= size) return file;
  require_size_limit(file.name(), size);
  const std::optional<Bytes> free = inspect_file_system(directory).free;
  if (free && size - file.size() > *free) {
    throw not_enough_space(file.name(), size - file.size(), *free);
  }
  const int error_number = allocate_blocks(file.descriptor(), size, file.alignment(), file.size());
  if (error_number != 0) throw space_ran_out(file.name(), size - file.size(), free, error_number);
  file.size_ = size;
  return file;
}

File File::open_as(const std::string& opened, const std::string& place, bool writable,
                   Access access) {
  const bool direct = access == Access::direct;
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | (direct ? O_DIRECT : 0);
  Descriptor file(::open(opened.c_str(), flags));
  if (!file.is_open()) {
    const int error_number = errno;
    if (direct && error_number == EINVAL) throw no_direct_io(place);
    throw Error(ErrorCategory::io,
                fmt::format("cannot open {} for {}", place, writable ? "writing" : "reading"),
                error_number);
  }
  if (!direct) warn_of_buffering(place);
  struct stat status {};
  if (fstat(file.number(), &status) != 0) {
    throw Error(ErrorCategory::io, place + ": cannot read the file's status", errno);
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCategory::io, place + " is not a regular file; choose one");
  }
  const Bytes alignment = direct ? direct_alignment(file, place) : 1;
  return {std::move(file), place, static_cast<Bytes>(status.st_size), alignment};
}

File File::open_for_pages(const std::filesystem::path& path, bool writable) {
  try {
    File file = open(path, writable);
    if (kPage % file.alignment() == 0) return file;
  } catch (const Error&) {
    // The file system has no direct I/O.
  }
  return open(path, writable, Access::buffered);
}

File File::create(const std::filesystem::path& path, Bytes size) {
  const std::string place = path.string();
  require_size_limit(place, size);
  Descriptor file(::open(place.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.is_open()) {
    throw Error(ErrorCategory::io, fmt::format("cannot create {}", place), errno);
  }
  File created(std::move(file), place, 0, 1);
  if (size == 0) return created;
  if (fallocate(created.descriptor(), 0, 0, static_cast<off_t>(size)) != 0) {
    if (errno != EOPNOTSUPP) {
      throw Error(ErrorCategory::io,
                  fmt::format("{}: cannot allocate {}", place, format_bytes(size)), errno);
    }
    created.resize(size);
  }
  created.size_ = size;
  return created;
}

File File::reopened(bool writable, Access access) const {
  return open_as(fmt::format("/proc/self/fd/{}", descriptor()), name_, writable, access);
}

void File::resize(Bytes size) const {
  require_size_limit(name_, size);
  if (ftruncate(descriptor(), static_cast<off_t>(size)) == 0) return;
  throw Error(ErrorCategory::io, fmt::format("{}: cannot make it {} bytes long", name_, size),
              errno);
}

bool File::link(const std::filesystem::path& path) const {
  const std::string self = fmt::format("/proc/self/fd/{}", descriptor());
  if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
    sync_name(path);
    return true;
  }
  if (errno == EXDEV || errno == ENOENT) return false;
  throw Error(ErrorCategory::io, fmt::format("cannot name a swap file {}", path.string()), errno);
}

void File::sync() const {
  if (fdatasync(descriptor()) == 0) return;
  throw Error(ErrorCategory::io, fmt::format("{}: cannot write all to the disk", name_), errno);
}

}  // namespace ballast::aio
