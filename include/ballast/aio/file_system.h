#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/core/units.h"

namespace ballast::aio {

/// What a directory lies on.
struct FileSystem {
  enum class Kind {
    disk,     ///< ext4, xfs, btrfs, f2fs, zfs and others with a block device below
    memory,   ///< tmpfs, ramfs: swapping to it saves no memory
    overlay,  ///< a container's layers: writes go through another file system
    network,  ///< NFS, CIFS, Ceph, FUSE, 9p and others: another machine or process answers
  };
  Kind kind = Kind::disk;
  std::string type;           ///< as mount(8) calls it ("ext4"), or "0x..." when unknown
  std::optional<Bytes> free;  ///< for this user; nothing when the file system does not say
  std::uint64_t device = 0;   ///< equal for directories on the same file system
};

/// Looks at `directory` (statfs). Throws Error(io) when it is missing or no directory.
FileSystem inspect_file_system(const std::filesystem::path& directory);

/// "" when the file system suits swapping, else why not ("/dev/shm is a tmpfs: ...").
std::string unsuited_for_swap(const FileSystem& file_system,
                              const std::filesystem::path& directory);

}  // namespace ballast::aio
