#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

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

}  // namespace ballast::aio
