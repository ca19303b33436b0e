#pragma once

#include <string>
#include <string_view>

#include <sys/stat.h>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::aio {

/// A file locked (flock) by its creator, with a name that later runs recognise.
struct NamedFile {
  Descriptor descriptor;
  std::string path;
};

/// create_named() names files PREFIX PID-N.
inline constexpr std::string_view kSwapPrefix = ".ballast-swap-";

/// Locks the open file, unless another process has locked it. The lock is held until the descriptor
/// is closed.
bool try_lock(const Descriptor& file);
/// Whether `name` in the open `directory` is still the file with `status`.
bool is_same_file(int directory, const char* name, const struct stat& status);

/// Creates DIRECTORY/.ballast-swap-PID-N with `flags` added to O_RDWR and locks it. The
/// file counts as in use until the descriptor is closed, also by the end of the process. On failure
/// the descriptor is not open and errno is set.
NamedFile create_named(const std::string& directory, int flags);

/// A file without a name, open with O_RDWR and `flags`: O_TMPFILE, or create_named and an unlink at
/// once where the file system has no O_TMPFILE. On failure it is not open and errno is set.
Descriptor open_nameless(const std::string& directory, int flags);

/// For tests: makes open_nameless use create_named everywhere.
void force_named_files(bool forced);

/// Disables copy-on-write on btrfs, which would move allocated blocks. The file must be empty. Best
/// effort.
void forbid_copy_on_write(const Descriptor& file);

/// Makes the file `descriptor`, which has `begin` bytes, exactly `size` bytes long with all its
/// blocks allocated: with fallocate, or by writing zeros where the file system lacks it.
/// `alignment` is File::alignment(), of which `begin` is a multiple. Returns 0 or the errno.
int allocate_blocks(int descriptor, Bytes size, Bytes alignment, Bytes begin = 0);

/// allocate_blocks without fallocate: writes zeros.
int write_zeros(int descriptor, Bytes size, Bytes alignment, Bytes begin = 0);

}  // namespace ballast::aio
