#include "ballast/text/output_file.h"

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

namespace ballast::text {
namespace {

namespace fs = std::filesystem;

enum class OutputKind : std::uint8_t { free, file, stream };

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw Error(ErrorCategory::usage, fmt::format("{} {}", printable(path.string(), 4096), why));
}

/// Standard output before reserve_standard_output(); null if it was not called.
Descriptor& reserved() {
  static Descriptor only;
  return only;
}

int standard_output() {
  return reserved().is_open() ? reserved().number() : STDOUT_FILENO;
}

/// The number of a descriptor in a name like /dev/stdout or /dev/fd/3.
std::optional<int> number_in(const std::string& name) {
  if (name == "/dev/stdout") return STDOUT_FILENO;
  if (name == "/dev/stderr") return STDERR_FILENO;
  for (const std::string& folder :
       {std::string("/dev/fd/"), std::string("/proc/self/fd/"),
        std::string("/proc/thread-self/fd/"), fmt::format("/proc/{}/fd/", ::getpid())}) {
    if (!name.starts_with(folder)) continue;
    int number = -1;
    const char* const end = name.data() + name.size();
    const auto read = std::from_chars(name.data() + folder.size(), end, number);
    if (read.ec == std::errc{} && read.ptr == end) return number;
  }
  return std::nullopt;
}

/// The open descriptor that `path`, or a symbolic link at `path`, names. Opening it again would
/// write at the beginning of a file, and a new file cannot be made next to it.
std::optional<int> named_descriptor(const fs::path& path) {
  constexpr int kMaxLinks = 40;  // as in Linux
  fs::path place = path;
  for (int i = 0; i < kMaxLinks; ++i) {
    const auto number = number_in(place.lexically_normal().string());
    if (number) return *number == STDOUT_FILENO ? standard_output() : *number;
    std::error_code error;
    const fs::path target = fs::read_symlink(place, error);
    if (error) break;
    place = place.parent_path() / target;
  }
  return std::nullopt;
}

bool is_standard_output(const fs::path& path) {
  if (const auto number = named_descriptor(path)) return *number == standard_output();
  struct stat target = {};
  struct stat standard = {};
  if (path.empty() || ::stat(path.c_str(), &target) != 0) return false;
  return ::fstat(standard_output(), &standard) == 0 && target.st_dev == standard.st_dev &&
         target.st_ino == standard.st_ino;
}

bool is_null_device(const fs::path& path) {
  struct stat target = {};
  struct stat null = {};
  return ::stat(path.c_str(), &target) == 0 && ::stat("/dev/null", &null) == 0 &&
         S_ISCHR(target.st_mode) && target.st_rdev == null.st_rdev;
}

bool is_below(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  const fs::path inside =
      fs::weakly_canonical(path, error).lexically_relative(fs::weakly_canonical(folder, error));
  return !error && !inside.empty() && *inside.begin() != "..";
}

void refuse_input(const fs::path& path, const OutputRule& rule) {
  for (const fs::path& input : rule.inputs) {
    std::error_code ignored;
    if (fs::equivalent(path, input, ignored) || is_below(path, input)) {
      refuse(path, "is an input of this command, so it is not replaced; choose another file");
    }
  }
}

bool begins_with(const fs::path& path, std::string_view mark) {
  if (mark.empty()) return false;
  std::string head(mark.size(), '\0');
  try {
    const Descriptor file = open_file(path, O_RDONLY, ErrorCategory::io);
    read_fully(file, path, 0, std::as_writable_bytes(std::span(head)));
  } catch (const Error&) {
    return false;  // too short, or not readable by this user
  }
  return head == mark;
}

void refuse_missing_folder(const fs::path& path) {
  const fs::path folder = path.parent_path();
  std::error_code error;
  if (folder.empty() || fs::exists(folder, error) || error) return;
  refuse(path,
         fmt::format("cannot be written: there is no folder {}; make it or choose another file",
                     printable(folder.string(), 4096)));
}

OutputKind place_of(const fs::path& path, const OutputRule& rule) {
  if (named_descriptor(path)) return OutputKind::stream;
  struct stat status = {};
  struct stat own = {};
  if (::lstat(path.c_str(), &own) != 0) {
    refuse_missing_folder(path);
    return OutputKind::free;
  }
  const bool is_link = S_ISLNK(own.st_mode);
  const bool resolved = ::stat(path.c_str(), &status) == 0;
  if (resolved && (S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode))) return OutputKind::stream;
  if (resolved && S_ISDIR(status.st_mode)) refuse(path, "is a directory; give the name of a file");
  if (resolved && !S_ISREG(status.st_mode)) refuse(path, "is not a file; give the name of a file");
  refuse_input(path, rule);
  if (rule.overwrite) return OutputKind::file;
  if (is_link) {
    refuse(path,
           "is a symbolic link: choose another file, or give --overwrite to replace the link (its "
           "target stays)");
  }
  if (status.st_size == 0 || begins_with(path, rule.begins)) return OutputKind::file;
  refuse(path, fmt::format("exists{}: choose another file, or give --overwrite to replace it",
                           rule.begins.empty() ? "" : " and is not " + rule.kind));
}

/// Opens a device or a pipe.
Descriptor open_stream(const fs::path& path) {
  const std::optional<int> named = named_descriptor(path);
  const int number = named ? ::fcntl(*named, F_DUPFD_CLOEXEC, 0)
                           : ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (number >= 0) return Descriptor(number);
  const int error_number = errno;
  if (error_number == EINTR) throw Error(ErrorCategory::interrupted, "interrupted");
  throw Error(ErrorCategory::io, fmt::format("cannot write {}", path.string()), error_number);
}

}  // namespace

void check_output(const fs::path& path, const OutputRule& rule) {
  if (place_of(path, rule) != OutputKind::stream) {
    const ReplacedFile probe(path);
  } else if (named_descriptor(path)) {
    static_cast<void>(open_stream(path));
  } else if (::access(path.c_str(), W_OK) != 0) {  // opening a pipe would wait for its reader
    const int error_number = errno;
    throw Error(ErrorCategory::io, fmt::format("cannot write {}", path.string()), error_number);
  }
}

void refuse_same_output(const fs::path& one, const fs::path& other) {
  if (one.empty() || other.empty() || is_null_device(one)) return;
  const auto number = named_descriptor(one);
  std::error_code error;  // "a" and "./a", which may not exist
  const fs::path first = fs::weakly_canonical(fs::absolute(one, error), error);
  const bool same_path = first == fs::weakly_canonical(fs::absolute(other, error), error) && !error;
  if (!same_path && (!number || number != named_descriptor(other))) return;
  refuse(one, "is named for two outputs; choose another file for one of them");
}

void write_output(const fs::path& path, const OutputRule& rule, std::string_view content) {
  OutputFile file(path, rule);
  file.write(content);
  file.commit();
}

void reserve_standard_output(const fs::path& path) {
  if (reserved().is_open() || !is_standard_output(path) || is_null_device(path)) return;
  std::fflush(stdout);
  reserved() = Descriptor(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0));
  if (reserved().is_open()) ::dup2(STDERR_FILENO, STDOUT_FILENO);
}

OutputFile::OutputFile(fs::path path, const OutputRule& rule) : path_(std::move(path)) {
  const OutputKind place = place_of(path_, rule);
  is_new_ = place == OutputKind::free;
  if (place == OutputKind::stream) {
    stream_ = open_stream(path_);
  } else {
    file_.emplace(path_);
  }
}

void OutputFile::write(std::span<const std::byte> bytes) {
  if (file_) return file_->write(bytes);
  write_fully(stream_, path_, bytes);
}

void OutputFile::commit() {
  if (!file_) return;
  if (!is_new_) return file_->commit();
  try {
    file_->commit_as_new();
  } catch (const Error& error) {
    if (error.error_number() != EEXIST) throw;
    refuse(path_, "was made by another process; choose another file");
  }
}

}  // namespace ballast::text
