#include "src/train/posix_file.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ballast::train {
namespace {

// Linux transfers at most 2 GiB less a page per call.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;

}  // namespace

Descriptor open_file(const std::filesystem::path& path, int flags, ErrorCategory category) {
  while (true) {
    const int number = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
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
      throw Error(ErrorCategory::data,
                  fmt::format("{} ends at offset {}, {} bytes before what it should hold: it is "
                              "truncated or was changed while in use",
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
    throw Error(ErrorCategory::io, fmt::format("cannot flush {} to its disk", path.string()),
                error_number);
  }
}

void sync_directory(const std::filesystem::path& directory) {
  const auto shown = directory.empty() ? std::filesystem::path(".") : directory;
  sync_file(open_file(shown, O_RDONLY | O_DIRECTORY, ErrorCategory::io), shown);
}

}  // namespace ballast::train
