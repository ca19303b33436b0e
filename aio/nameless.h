#pragma once

#include <string>

#include "ballast/core/descriptor.h"

namespace ballast::aio {

/// A file that its creator has locked (flock), under a name by which later runs know what it is.
struct NamedFile {
  Descriptor descriptor;
  std::string path;
};

/// Creates DIRECTORY/.ballast-swap-PID-N with `flags` added to O_RDWR and locks it: from the moment
/// that this returns until the descriptor is closed, by whatever end of the process, the file
/// counts as in use. The descriptor is not open, and errno set, where that fails.
NamedFile create_named(const std::string& directory, int flags);

/// A file without a name, open with O_RDWR and `flags`: O_TMPFILE, or create_named and an unlink at
/// once where the file system has no O_TMPFILE. Not open, and errno set, where that fails.
Descriptor open_nameless(const std::string& directory, int flags);

/// For tests: whether open_nameless goes the second way everywhere.
void force_named_files(bool forced);

/// Asks the file system not to copy on write (btrfs), which would move the file's blocks about and
/// defeat their allocation. For an empty file; best effort.
void forbid_copy_on_write(const Descriptor& file);

}  // namespace ballast::aio
