#include "src/formats/new_folder.h"

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;

fs::path parent_of(const fs::path& folder) {
  return folder.has_parent_path() ? folder.parent_path() : fs::path(".");
}

/// Opens a folder and locks it. None if another process has locked it, or if it cannot be locked.
Descriptor lock(const fs::path& folder) {
  Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (opened.is_open() && ::flock(opened.number(), LOCK_EX | LOCK_NB) == 0) return opened;
  return {};
}

[[noreturn]] void fail_to_create(const fs::path& folder, int error_number) {
  throw Error(ErrorCategory::io, fmt::format("cannot create {}", folder.string()), error_number);
}

}  // namespace

MadeDirectory::MadeDirectory(const fs::path& directory, std::string_view kind,
                             std::string_view another) {
  std::error_code error;
  if (fs::is_symlink(directory, error) && !fs::exists(directory, error)) {
    throw Error(ErrorCategory::io, fmt::format("the {} {} is a symbolic link without a target; {}",
                                               kind, directory.string(), another));
  }
  for (fs::path place = directory; place.has_relative_path() && !fs::exists(place, error);
       place = place.parent_path()) {
    made_.push_back(place);
  }
  fs::create_directories(directory, error);
  if (error) {
    throw Error(ErrorCategory::io,
                fmt::format("cannot create the {} {}; {}", kind, directory.string(), another),
                error.value());
  }
  text::try_to_sync_name(directory);
  for (const fs::path& place : made_) text::try_to_sync_name(place);
}

MadeDirectory::~MadeDirectory() {
  std::error_code error;
  for (const fs::path& place : made_) {
    if (!fs::is_empty(place, error) || error || !fs::remove(place, error)) return;
  }
}

NewFolder::NewFolder(fs::path folder, Bytes bytes) : folder_(std::move(folder)) {
  if (folder_.filename().empty()) folder_ = folder_.parent_path();
  temporary_ = text::temporary_of(folder_);
  make();
  try {
    check_space(bytes);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
    throw;
  }
}

NewFolder::~NewFolder() {
  if (finished_) return;
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void NewFolder::make() {
  std::error_code error;
  // Nothing can be renamed to a link. Without this check, that would be noticed after the work.
  if (fs::is_symlink(folder_, error)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} is a symbolic link; name the folder itself", folder_.string()));
  }
  const bool free = !fs::exists(folder_, error) ||
                    (fs::is_directory(folder_, error) && fs::is_empty(folder_, error));
  if (!free) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} exists; choose a folder that does not", folder_.string()));
  }
  parent_.emplace(parent_of(folder_), "folder", "choose another");
  for (const fs::path& left : text::unfinished_of(folder_)) {
    if (lock(left).is_open()) fs::remove_all(left, error);
  }
  if (!fs::create_directory(temporary_, error)) fail_to_create(folder_, error.value());
  in_use_ = lock(temporary_);
}

void NewFolder::check_space(Bytes needed) const {
  std::error_code error;
  const fs::space_info space = fs::space(parent_of(folder_), error);
  if (error || space.available >= needed) return;
  throw Error(
      ErrorCategory::io,
      fmt::format("{} needs {}, but its disk has only {} free; choose another place or make room",
                  folder_.string(), format_bytes(needed), format_bytes(space.available)));
}

void NewFolder::add(const std::string& name, std::string_view content) const {
  text::ReplacedFile file(temporary_ / name);
  file.write(content);
  file.commit();
}

void NewFolder::finish() {
  text::sync_folder(temporary_);
  if (std::rename(temporary_.c_str(), folder_.c_str()) != 0) fail_to_create(folder_, errno);
  finished_ = true;
  text::sync_folder(parent_of(folder_));
}

}  // namespace ballast::formats
