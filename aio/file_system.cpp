#include "ballast/aio/file_system.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include "ballast/core/error.h"

namespace ballast::aio {
namespace {

using Kind = FileSystem::Kind;

struct Known {
  std::uint32_t magic;
  Kind kind;
  std::string_view type;
};

// Numbers that are not in linux/magic.h (6.1) come from the file systems' own sources, under fs/ of
// the kernel unless noted otherwise.
constexpr std::array kKnown = {
    Known{EXT4_SUPER_MAGIC, Kind::disk, "ext4"},  // ext2 and ext3 have the same number
    Known{XFS_SUPER_MAGIC, Kind::disk, "xfs"},
    Known{BTRFS_SUPER_MAGIC, Kind::disk, "btrfs"},
    Known{F2FS_SUPER_MAGIC, Kind::disk, "f2fs"},
    Known{0x2fc12fc1, Kind::disk, "zfs"},       // OpenZFS, include/sys/fs/zfs.h
    Known{0xca451a4e, Kind::disk, "bcachefs"},  // bcachefs/bcachefs_format.h
    Known{0x3153464a, Kind::disk, "jfs"},       // jfs/jfs_superblock.h
    Known{0x5346544e, Kind::disk, "ntfs"},      // ntfs/ntfs.h
    Known{0x7366746e, Kind::disk, "ntfs3"},     // ntfs3/super.c
    Known{EXFAT_SUPER_MAGIC, Kind::disk, "exfat"},
    Known{MSDOS_SUPER_MAGIC, Kind::disk, "vfat"},
    Known{NILFS_SUPER_MAGIC, Kind::disk, "nilfs2"},
    Known{REISERFS_SUPER_MAGIC, Kind::disk, "reiserfs"},
    Known{OCFS2_SUPER_MAGIC, Kind::disk, "ocfs2"},
    Known{0x01161970, Kind::disk, "gfs2"},  // uapi/linux/gfs2_ondisk.h
    Known{TMPFS_MAGIC, Kind::memory, "tmpfs"},
    Known{RAMFS_MAGIC, Kind::memory, "ramfs"},
    Known{HUGETLBFS_MAGIC, Kind::memory, "hugetlbfs"},
    Known{OVERLAYFS_SUPER_MAGIC, Kind::overlay, "overlay"},
    Known{0x61756673, Kind::overlay, "aufs"},  // aufs, include/uapi/linux/aufs_type.h
    Known{ECRYPTFS_SUPER_MAGIC, Kind::overlay, "ecryptfs"},
    Known{NFS_SUPER_MAGIC, Kind::network, "nfs"},
    Known{SMB_SUPER_MAGIC, Kind::network, "smb"},
    Known{CIFS_SUPER_MAGIC, Kind::network, "cifs"},
    Known{SMB2_SUPER_MAGIC, Kind::network, "smb2"},
    Known{CEPH_SUPER_MAGIC, Kind::network, "ceph"},
    Known{FUSE_SUPER_MAGIC, Kind::network, "fuse"},  // virtiofs too
    Known{V9FS_MAGIC, Kind::network, "9p"},
    Known{AFS_SUPER_MAGIC, Kind::network, "afs"},
    Known{AFS_FS_MAGIC, Kind::network, "afs"},
    Known{CODA_SUPER_MAGIC, Kind::network, "coda"},
    Known{0x786f4256, Kind::network, "vboxsf"},  // vboxsf/super.c
    Known{0x0bd00bd0, Kind::network, "lustre"},  // coreutils, src/stat.c
    Known{0x47504653, Kind::network, "gpfs"},    // coreutils, src/stat.c
    Known{0x19830326, Kind::network, "beegfs"},  // BeeGFS, client_module FhgfsOpsSuper.h
    Known{0xaad7aaea, Kind::network, "panfs"},   // coreutils, src/stat.c
};

Error no_directory(const std::string& place, int error_number) {
  if (error_number == ENOENT || error_number == ENOTDIR) {
    return {ErrorCategory::io, place + ": no such directory; create it or choose another"};
  }
  return {ErrorCategory::io, place + ": cannot read the directory's status", error_number};
}

}  // namespace

FileSystem inspect_file_system(const std::filesystem::path& directory) {
  const std::string place = directory.string();
  struct stat status {};
  if (stat(place.c_str(), &status) != 0) throw no_directory(place, errno);
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCategory::io, place + " is not a directory; choose one", ENOTDIR);
  }
  struct statfs found {};
  if (statfs(place.c_str(), &found) != 0) throw no_directory(place, errno);
  // f_type is signed and wider than 32 bits on some machines.
  const auto magic = static_cast<std::uint32_t>(found.f_type);
  FileSystem result;
  result.device = status.st_dev;
  const auto* known = std::find_if(kKnown.begin(), kKnown.end(),
                                   [&](const Known& entry) { return entry.magic == magic; });
  if (known != kKnown.end()) {
    result.kind = known->kind;
    result.type = known->type;
  } else {
    result.type = fmt::format("{:#x}", magic);
  }
  struct statvfs space {};
  if (statvfs(place.c_str(), &space) == 0 && space.f_blocks > 0) {
    result.free = Bytes{space.f_bavail} * space.f_frsize;
  }
  return result;
}

std::string unsuited_for_swap(const FileSystem& file_system,
                              const std::filesystem::path& directory) {
  const auto because = [&](std::string_view article, std::string_view why) {
    return fmt::format("{} is on {} {} file system: {}", directory.string(), article,
                       file_system.type, why);
  };
  switch (file_system.kind) {
    case Kind::disk:
      return "";
    case Kind::memory:
      return because("a", "its files are in memory, so swapping to it saves no memory");
    case Kind::overlay:
      return because("an", "container layers are slow to write and deleted with the container");
    case Kind::network:
      return because("a", "it depends on another machine or process, which is slow and unreliable");
  }
  return "";
}

}  // namespace ballast::aio
