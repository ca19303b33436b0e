#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
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
/// the file and offset on a failed read, Error(data) when the file is too short.
void read_fully(const Descriptor& file, const std::filesystem::path& path, Bytes offset,
                std::span<std::byte> out);

/// Appends all of `bytes` at the descriptor's position, retrying short and interrupted writes.
/// Throws Error(io) naming the file.
void write_fully(const Descriptor& file, const std::filesystem::path& path,
                 std::span<const std::byte> bytes);

/// Makes the content of an open file durable. Throws Error(io) naming it.
void sync_file(const Descriptor& file, const std::filesystem::path& path);
/// Makes names that were added to a folder or changed in it durable. Throws Error(io) naming it.
void sync_folder(const std::filesystem::path& folder);
/// Like sync_folder() for the parent folder of `path`.
void sync_name(const std::filesystem::path& path);
/// Like sync_name(), best effort: some folders cannot be opened for reading. Logs errors at level
/// debug.
void try_to_sync_name(const std::filesystem::path& path);

/// PATH.tmp-PID, where this process writes what it renames to `path` when it is complete. The name
/// is shortened if it would be too long for a file.
std::filesystem::path temporary_of(const std::filesystem::path& path);
/// The files and folders that any process has under such names for `path`.
std::vector<std::filesystem::path> unfinished_of(const std::filesystem::path& path);

/// Replaces `path` by a copy if it is a symbolic link, or if its file has another name, so that
/// appending to it changes nothing elsewhere. Returns whether it did. Does nothing if it is not a
/// regular file. Throws Error(io).
bool make_separate(const std::filesystem::path& path);

/// The content of a settings file or pipe, at most 1 MiB. `kind` ("config") is its name in
/// messages. Throws Error(config).
std::string read_settings(const std::filesystem::path& path, std::string_view kind);

/// A file that grows by whole records.
class AppendedFile {
 public:
  AppendedFile() = default;
  /// Opens `path` with `flags` in addition to O_WRONLY | O_CREAT | O_APPEND. Throws like
  /// open_file().
  AppendedFile(std::filesystem::path path, int flags);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const Descriptor& descriptor() const { return descriptor_; }
  /// Appends `record`, which has reached the kernel when this returns. If the write fails (full
  /// disk, file-size limit), removes the partly written record and throws Error(io) naming the
  /// file.
  void append(std::string_view record);
  /// Truncates the file to `size` bytes if it is longer. Throws Error(io).
  void cut(Bytes size);
  /// Size after the last append() or cut(); 0 before, independent of the file's content.
  [[nodiscard]] Bytes size() const { return size_; }

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
  Bytes size_ = 0;
};

/// An atomically written file: it is written as PATH.tmp-PID and renamed by commit(). It keeps the
/// mode of a file that it replaces. A symbolic link at PATH is replaced itself; its target does not
/// change.
class ReplacedFile {
 public:
  /// Throws Error(io) naming `path` when a regular file cannot be created there.
  explicit ReplacedFile(std::filesystem::path path);
  /// Removes the temporary file unless committed.
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  /// Path of the content until commit().
  [[nodiscard]] const std::filesystem::path& temporary() const { return temporary_; }
  /// Makes the file `size` bytes long and allocates it on the disk, if the file system can. Throws
  /// Error(io) naming the file if the disk lacks the space.
  void reserve(Bytes size);
  /// Writes all of `bytes` from byte `offset`. Throws Error(io) naming the file.
  void write_at(Bytes offset, std::span<const std::byte> bytes);
  /// Appends. Throws Error(io) naming the file.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Flushes and renames the file. Throws Error(io) naming it.
  void commit();
  /// Like commit(), but throws Error(io) with EEXIST if PATH exists, if the file system can detect
  /// that.
  void commit_as_new();

 private:
  void commit(unsigned flags);

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Descriptor descriptor_;
  bool committed_ = false;
};

}  // namespace ballast::text
