#include "src/train/run_place.h"

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

bool is_same(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

}  // namespace

RunPlace::RunPlace(fs::path directory)
    : directory_(std::move(directory)),
      descriptor_(text::open_file(directory_, O_PATH | O_DIRECTORY, ErrorCategory::io)) {}

RunPlace::Found RunPlace::look() const {
  struct stat here = {};
  struct stat own = {};
  if (::fstat(descriptor_.number(), &own) != 0) return {};
  const bool found = ::stat(directory_.c_str(), &here) == 0;
  if (found ? is_same(here, own) : errno != ENOENT && errno != ENOTDIR) return {};
  return find();
}

RunPlace::Found RunPlace::find() const {
  constexpr std::string_view kGone = " (deleted)";
  std::error_code error;
  const fs::path name =
      fs::read_symlink(fmt::format("/proc/self/fd/{}", descriptor_.number()), error);
  struct stat named = {};
  struct stat own = {};
  if (error || ::fstat(descriptor_.number(), &own) != 0) return {};
  if (::stat(name.c_str(), &named) == 0 && is_same(named, own)) return {Fate::moved, name};
  if (own.st_nlink > 0 && !name.string().ends_with(kGone)) return {};
  const bool is_free = !fs::exists(directory_, error) ||
                       (fs::is_directory(directory_, error) && fs::is_empty(directory_, error));
  return {is_free ? Fate::deleted : Fate::replaced, {}};
}

}  // namespace ballast::train
