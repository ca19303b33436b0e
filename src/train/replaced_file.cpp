#include "src/train/replaced_file.h"

#include <cerrno>
#include <cstdio>
#include <span>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "src/train/posix_file.h"

namespace ballast::train {
namespace {

/// Runs `action`; its failure names the file that the caller knows, not the temporary one.
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

ReplacedFile::ReplacedFile(std::filesystem::path path)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_.string(), ::getpid())) {
  std::error_code error;
  const auto status = std::filesystem::status(path_, error);
  // A rename would put a file in the place of a device, and cannot replace a directory.
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    throw Error(ErrorCategory::io,
                fmt::format("cannot write {}: it is there and no regular file", path_.string()));
  }
  if (path_.filename().empty()) {
    throw Error(ErrorCategory::io,
                fmt::format("cannot write {}: it names a directory", path_.string()));
  }
  descriptor_ = naming(path_, [&] {
    return open_file(temporary_, O_WRONLY | O_CREAT | O_TRUNC, ErrorCategory::io);
  });
}

ReplacedFile::~ReplacedFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void ReplacedFile::write(std::string_view text) {
  naming(path_, [&] { write_fully(descriptor_, temporary_, std::as_bytes(std::span(text))); });
}

void ReplacedFile::commit() {
  naming(path_, [&] { sync_file(descriptor_, temporary_); });
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error_number = errno;
    throw Error(ErrorCategory::io, fmt::format("cannot write {}", path_.string()), error_number);
  }
  committed_ = true;
  sync_directory(path_.parent_path());
}

}  // namespace ballast::train
