#include "ballast/aio/file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "aio/allocate.h"

namespace ballast::aio {
namespace {

/// Closes on the way out of a failure.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

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

void require_directory(const std::string& place) {
  struct stat status {};
  if (stat(place.c_str(), &status) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      throw Error(ErrorCategory::io, place + ": no such directory; create it or choose another",
                  errno);
    }
    throw Error(ErrorCategory::io, place + ": cannot be looked up", errno);
  }
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCategory::io, place + " is not a directory; choose one", ENOTDIR);
  }
}

/// Refuses what the file-size limit would stop later, with SIGXFSZ.
void require_size_limit(const std::string& place, Bytes size) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (size <= limit.rlim_cur) return;
  throw file_too_large(place, size,
                       fmt::format("the file-size limit of {} bytes; raise it with 'ulimit -f "
                                   "unlimited'",
                                   limit.rlim_cur));
}

/// Free bytes for this user, or nothing when the file system does not say.
std::optional<Bytes> free_space(const std::string& place) {
  struct statvfs status {};
  if (statvfs(place.c_str(), &status) != 0 || status.f_blocks == 0) return std::nullopt;
  return Bytes{status.f_bavail} * status.f_frsize;
}

Error not_enough_space(const std::string& place, Bytes size, Bytes available) {
  return {ErrorCategory::io,
          fmt::format("{}: needs {} ({} bytes), free are {} ({} bytes); free some space or choose "
                      "another path",
                      place, format_bytes(size), size, format_bytes(available), available),
          ENOSPC};
}

/// What was free was enough, and yet it ran out.
Error space_ran_out(const std::string& place, Bytes size, std::optional<Bytes> before,
                    int error_number) {
  return {ErrorCategory::io,
          fmt::format("{}: needs {} ({} bytes), free were {}, but not all of it could be had: a "
                      "quota, or another program; choose another path",
                      place, format_bytes(size), size,
                      before ? format_bytes(*before) : "an unknown number of bytes"),
          error_number};
}

/// A file that is named just long enough to open it. A crash in between leaves the name behind.
int open_unlinked(const std::string& place, int flags) {
  static std::atomic<unsigned> serial = 0;
  while (true) {
    const std::string name = fmt::format("{}/.ballast-{}-{}", place, getpid(), ++serial);
    const int descriptor = ::open(name.c_str(), flags | O_CREAT | O_EXCL, 0600);
    const int error_number = errno;
    if (descriptor < 0 && error_number == EEXIST) continue;
    // Also after a failure: some kernels create the file before they find that it has no O_DIRECT.
    unlink(name.c_str());
    errno = error_number;
    return descriptor;
  }
}

int open_nameless(const std::string& place, bool direct) {
  const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  int descriptor = ::open(place.c_str(), flags | O_TMPFILE | O_EXCL, 0600);
  // How kernels and file systems say that they have no O_TMPFILE.
  if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT)) {
    descriptor = open_unlinked(place, flags);
  }
  if (descriptor >= 0) return descriptor;
  if (direct && errno == EINVAL) throw no_direct_io(place);
  if (errno == EACCES || errno == EPERM || errno == EROFS) {
    throw Error(ErrorCategory::io,
                place + ": the directory is not writable; choose another or change its permissions",
                errno);
  }
  throw Error(ErrorCategory::io, place + ": cannot create a file here; choose another directory",
              errno);
}

Bytes direct_alignment(int descriptor, const std::string& place) {
  struct statx status {};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0 ||
      (status.stx_mask & STATX_DIOALIGN) == 0) {
    return kPage;
  }
  if (status.stx_dio_offset_align == 0) throw no_direct_io(place);
  return std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
}

}  // namespace

File::File(int descriptor, std::string name, Bytes size, Bytes alignment)
    : descriptor_(descriptor), name_(std::move(name)), size_(size), alignment_(alignment) {}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      name_(std::move(other.name_)),
      size_(std::exchange(other.size_, 0)),
      alignment_(other.alignment_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(name_, other.name_);
  std::swap(size_, other.size_);
  std::swap(alignment_, other.alignment_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

File File::create_anonymous(const std::filesystem::path& directory, Bytes size, Access access) {
  const std::string place = directory.string();
  require_directory(place);
  require_size_limit(place, size);
  const auto available = free_space(place);
  if (available && size > *available) throw not_enough_space(place, size, *available);
  const bool direct = access == Access::direct;
  Descriptor descriptor(open_nameless(place, direct));
  const Bytes alignment = direct ? direct_alignment(descriptor.get(), place) : 1;
  switch (const int error_number = allocate_blocks(descriptor.get(), size, alignment)) {
    case 0:
      return {descriptor.release(), place, size, alignment};
    case ENOSPC:
    case EDQUOT:
      throw space_ran_out(place, size, available, error_number);
    case EFBIG:
      throw file_too_large(place, size, "what the file system can hold; choose a path on another");
    default:
      throw Error(ErrorCategory::io,
                  fmt::format("{}: cannot allocate {}", place, format_bytes(size)), error_number);
  }
}

File File::open(const std::filesystem::path& path, bool writable, Access access) {
  const std::string place = path.string();
  const bool direct = access == Access::direct;
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | (direct ? O_DIRECT : 0);
  Descriptor descriptor(::open(place.c_str(), flags));
  if (descriptor.get() < 0) {
    if (direct && errno == EINVAL) throw no_direct_io(place);
    throw Error(ErrorCategory::io,
                fmt::format("cannot open {} for {}", place, writable ? "writing" : "reading"),
                errno);
  }
  struct stat status {};
  if (fstat(descriptor.get(), &status) != 0) {
    throw Error(ErrorCategory::io, place + ": cannot be looked up", errno);
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCategory::io, place + " is not a regular file; choose one");
  }
  const Bytes alignment = direct ? direct_alignment(descriptor.get(), place) : 1;
  return {descriptor.release(), place, static_cast<Bytes>(status.st_size), alignment};
}

}  // namespace ballast::aio
