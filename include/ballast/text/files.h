#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::text {

/// open(2) with O_CLOEXEC; a new file gets `mode` less the umask. Throws Error(`category`):
/// "cannot open PATH: <strerror>".
Descriptor open_file(const std::filesystem::path& path, int flags, ErrorCategory category,
                     unsigned mode = 0666);

/// Size of an open regular file in bytes. Throws Error(`category`) when it is not one.
Bytes regular_file_size(const Descriptor& file, const std::filesystem::path& path,
                        ErrorCategory category);

/// Fills `out` from byte `offset`, retrying short and interrupted reads. Throws Error(io) naming
/// the file and offset on a failed read, Error(data) when the file ends before.
void read_fully(const Descriptor& file, const std::filesystem::path& path, Bytes offset,
                std::span<std::byte> out);

/// Appends all of `bytes` at the descriptor's position, retrying short and interrupted writes.
/// Throws Error(io) naming the file.
void write_fully(const Descriptor& file, const std::filesystem::path& path,
                 std::span<const std::byte> bytes);

/// All of a file of settings, at most 1 MiB; a pipe will do. `kind` ("config") is what the messages
/// call it. Throws Error(config).
std::string read_settings(const std::filesystem::path& path, std::string_view kind);

/// A file that appears under its name complete, or not at all: it is written as PATH.tmp-PID and
/// renamed at the end. A file that it replaces passes on its mode.
class ReplacedFile {
 public:
  /// Throws Error(io) naming `path` when no regular file can be put there.
  explicit ReplacedFile(std::filesystem::path path);
  /// Without commit(), nothing is left behind.
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  /// Where the content is until commit().
  [[nodiscard]] const std::filesystem::path& temporary() const { return temporary_; }
  /// Append. Throw Error(io) naming the file.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Puts the file in its place, on disk. Throws Error(io) naming it.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Descriptor descriptor_;
  bool committed_ = false;
};

}  // namespace ballast::text
