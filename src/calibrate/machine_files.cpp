#include "ballast/calibrate/machine_files.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include "ballast/core/random.h"
#include "ballast/text/files.h"

namespace ballast::calibrate {

std::filesystem::path machine_file(std::string_view kind, const std::string& key) {
  std::filesystem::path cache;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    cache = xdg;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    cache = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  return cache / "ballast" / fmt::format("{}-{:016x}.json", kind, fnv1a(key));
}

void make_machine_folder(const std::filesystem::path& file) {
  std::error_code failure;
  std::filesystem::create_directories(file.parent_path(), failure);
  if (failure) {
    throw Error(ErrorCategory::io, "cannot create the directory " + file.parent_path().string(),
                failure.value());
  }
}

Descriptor lock_machine_file(const std::filesystem::path& file) {
  make_machine_folder(file);
  const std::filesystem::path name = file.string() + ".lock";
  Descriptor lock = text::open_file(name, O_RDWR | O_CREAT, ErrorCategory::io);
  while (flock(lock.number(), LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int error_number = errno;
    throw Error(ErrorCategory::io, "cannot lock " + name.string(), error_number);
  }
  return lock;
}

}  // namespace ballast::calibrate
