#pragma once

#include <filesystem>
#include <string>

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
  /// descriptor, also after SIGKILL. Checks free space first.
  /// Throws Error(io) that names the directory and says what to do: missing, not writable, not
  /// enough space (with both numbers), file-size limit, file system without O_DIRECT.
  static File create_anonymous(const std::filesystem::path& directory, Bytes size,
                               Access access = Access::direct);

  /// An existing file for reading and, if `writable`, writing. Throws Error(io).
  static File open(const std::filesystem::path& path, bool writable,
                   Access access = Access::direct);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  /// Path of the file, or of the directory that holds the nameless file; for messages.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] Bytes size() const noexcept { return size_; }
  /// Granule of offsets, lengths and buffers in bytes (statx's STATX_DIOALIGN, else 4096; 1 when
  /// buffered).
  [[nodiscard]] Bytes alignment() const noexcept { return alignment_; }

 private:
  File(int descriptor, std::string name, Bytes size, Bytes alignment);

  int descriptor_ = -1;
  std::string name_;
  Bytes size_ = 0;
  Bytes alignment_ = 1;
};

}  // namespace ballast::aio
