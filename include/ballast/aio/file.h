#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::aio {

/// The file system of a directory.
struct FileSystem {
  enum class Kind {
    disk,     ///< ext4, xfs, btrfs, f2fs, zfs and others with a block device below
    memory,   ///< tmpfs, ramfs: swapping to it saves no memory
    overlay,  ///< a container's layers: writes go through another file system
    network,  ///< NFS, CIFS, Ceph, FUSE, 9p and others: served by another machine or process
  };
  Kind kind = Kind::disk;
  std::string type;           ///< name in mount(8) ("ext4"), or "0x..." if unknown
  std::optional<Bytes> free;  ///< for this user; unset if unknown
  std::uint64_t device = 0;   ///< equal for directories on the same file system
};

/// Inspects `directory` (statfs). Throws Error(io) when it is missing or not a directory.
FileSystem inspect_file_system(const std::filesystem::path& directory);

/// Returns "" if the file system is suitable for swapping, otherwise the reason ("/dev/shm is a
/// tmpfs: ...").
std::string unsuited_for_swap(const FileSystem& file_system,
                              const std::filesystem::path& directory);

/// An open file for asynchronous transfers. Owns its descriptor; move-only.
class File {
 public:
  enum class Access {
    direct,    ///< O_DIRECT: offset, length and buffer are multiples of alignment()
    buffered,  ///< through the page cache; only by explicit choice
  };

  /// A nameless file of exactly `size` bytes in `directory` (O_TMPFILE, or created and unlinked at
  /// once where the file system has none), its blocks allocated. It vanishes with its last
  /// descriptor, also after SIGKILL. It is locked (flock) as long as this object exists. Removes
  /// leftovers and checks free space first. Logs a warning for the first buffered file. Throws
  /// Error(io) that names the directory and says what to do: missing, not writable, not enough
  /// space (with both numbers), file-size limit, file system without O_DIRECT.
  static File create_anonymous(const std::filesystem::path& directory, Bytes size,
                               Access access = Access::direct);

  /// Throws those errors of create_anonymous that can be predicted. Leaves no file.
  static void check_anonymous(const std::filesystem::path& directory, Bytes size,
                              Access access = Access::direct);

  /// A file of `size` bytes in memory (memfd), allocated as it is written, for tests and benchmarks
  /// without a disk. Throws Error(io).
  static File create_in_memory(Bytes size);

  /// Opens an existing file for reading and, if `writable`, writing. Throws Error(io).
  static File open(const std::filesystem::path& path, bool writable,
                   Access access = Access::direct);
  ~File();
  File(File&& other) noexcept = default;
  File& operator=(File&& other) noexcept = default;
  /// Opens a swap file that create_anonymous() made in `directory` and link() named `path`. Locks
  /// it, and makes it `size` bytes long, with its blocks allocated, if it is shorter. Messages name
  /// `directory`, because `path` belongs to a checkpoint that may be removed. Throws Error(io),
  /// also if another process has locked it.
  static File open_swap(const std::filesystem::path& path, const std::filesystem::path& directory,
                        Bytes size, Access access);
  /// Opens like open(): direct if the file system allows it for whole pages, otherwise buffered.
  static File open_for_pages(const std::filesystem::path& path, bool writable);

  /// Creates `path`, or empties an existing file. `size` is its length, with blocks allocated where
  /// the file system can; 0: it grows with resize(). Throws Error(io).
  static File create(const std::filesystem::path& path, Bytes size);
  /// Returns another descriptor for the same open file, with its present size, even if it was
  /// renamed or removed. Throws Error(io).
  [[nodiscard]] File reopened(bool writable, Access access) const;
  /// Makes the file `size` bytes long on the disk; size() of this object does not change. Throws
  /// Error(io).
  void resize(Bytes size) const;

  /// Gives the file another name, or its first one if it is nameless. From then on it outlives its
  /// descriptor. False if `path` is on another file system, or if the file has no name and the file
  /// system no O_TMPFILE. The name is on the disk when this returns. Throws Error(io), for example
  /// if `path` exists.
  [[nodiscard]] bool link(const std::filesystem::path& path) const;
  /// Returns when all written data is on the disk. Throws Error(io).
  void sync() const;

  [[nodiscard]] int descriptor() const noexcept { return descriptor_.number(); }
  /// Path of the file, or of the directory that holds the nameless file; for messages.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] Bytes size() const noexcept { return size_; }
  /// Granule of offsets, lengths and buffers in bytes (statx's STATX_DIOALIGN, else 4096; 1 when
  /// buffered).
  [[nodiscard]] Bytes alignment() const noexcept { return alignment_; }

 private:
  File(Descriptor descriptor, std::string name, Bytes size, Bytes alignment);
  static File open_as(const std::string& place, const std::string& name, bool writable,
                      Access access);

  Descriptor descriptor_;
  std::string name_;
  Bytes size_ = 0;
  Bytes alignment_ = 1;
};

/// Number of removed files and their disk space.
struct Leftovers {
  unsigned files = 0;
  Bytes bytes = 0;
};

/// Removes the files of crashed runs in `directory`, with one log line: files that a SIGKILL
/// between creation and unlink left on a file system without O_TMPFILE. A file is in use while its
/// run holds a lock on it. Best effort; other files and other users' files are kept.
Leftovers remove_leftovers(const std::filesystem::path& directory);

}  // namespace ballast::aio
