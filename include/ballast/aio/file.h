#pragma once

#include <filesystem>
#include <string>

#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

namespace ballast::aio {

/// An open file for asynchronous transfers. Owns its descriptor; move-only.
class File {
 public:
  enum class Access {
    direct,    ///< O_DIRECT: offset, length and buffer are multiples of alignment()
    buffered,  ///< through the page cache; only by explicit choice
  };

  /// A nameless file of exactly `size` bytes in `directory` (O_TMPFILE, or created and unlinked at
  /// once where the file system has none), its blocks allocated. It vanishes with its last
  /// descriptor, also after SIGKILL. Removes leftovers and checks free space first. The first
  /// buffered file is warned of.
  /// Throws Error(io) that names the directory and says what to do: missing, not writable, not
  /// enough space (with both numbers), file-size limit, file system without O_DIRECT.
  static File create_anonymous(const std::filesystem::path& directory, Bytes size,
                               Access access = Access::direct);

  /// Throws what create_anonymous would throw, as far as can be known; leaves nothing behind.
  static void check_anonymous(const std::filesystem::path& directory, Bytes size,
                              Access access = Access::direct);

  /// An existing file for reading and, if `writable`, writing. Throws Error(io).
  static File open(const std::filesystem::path& path, bool writable,
                   Access access = Access::direct);

  [[nodiscard]] int descriptor() const noexcept { return descriptor_.number(); }
  /// Path of the file, or of the directory that holds the nameless file; for messages.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] Bytes size() const noexcept { return size_; }
  /// Granule of offsets, lengths and buffers in bytes (statx's STATX_DIOALIGN, else 4096; 1 when
  /// buffered).
  [[nodiscard]] Bytes alignment() const noexcept { return alignment_; }

 private:
  File(Descriptor descriptor, std::string name, Bytes size, Bytes alignment);

  Descriptor descriptor_;
  std::string name_;
  Bytes size_ = 0;
  Bytes alignment_ = 1;
};

/// What was removed, and the disk space that it had.
struct Leftovers {
  unsigned files = 0;
  Bytes bytes = 0;
};

/// Removes the files of dead runs in `directory`, with one log line: those that a SIGKILL between
/// creation and unlink left on a file system without O_TMPFILE. The lock that every run holds tells
/// the living from the dead. Best effort; other files and other users' are left alone.
Leftovers remove_leftovers(const std::filesystem::path& directory);

}  // namespace ballast::aio
