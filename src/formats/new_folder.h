#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::formats {

/// A directory that is made if it is missing, with its parents, and removed at the end of this
/// object if it is still empty. Its name and those of new parents are flushed to the disk, unless
/// the directories above cannot be read.
class MadeDirectory {
 public:
  /// Throws Error(io) that names the `kind` of directory and how to choose `another`.
  explicit MadeDirectory(const std::filesystem::path& directory,
                         std::string_view kind = "run directory",
                         std::string_view another = "choose another with --out");
  ~MadeDirectory();
  MadeDirectory(const MadeDirectory&) = delete;
  MadeDirectory& operator=(const MadeDirectory&) = delete;

  /// Lets the directory stay, even if it is empty.
  void keep() { made_.clear(); }

 private:
  std::vector<std::filesystem::path> made_;  ///< the innermost first
};

/// A folder that gets its name when it is complete: everything goes to FOLDER.tmp-PID, which
/// finish() renames.
class NewFolder {
 public:
  /// Removes unfinished folders that killed processes have left.
  /// `bytes`: size of its files. Throws Error(usage) if `folder` contains files or is a link;
  /// Error(io) if it cannot be made or its disk lacks the space.
  NewFolder(std::filesystem::path folder, Bytes bytes);
  /// Removes the temporary folder unless finish() was called.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// Place of its files until finish().
  [[nodiscard]] const std::filesystem::path& temporary() const { return temporary_; }
  /// Adds a small file. Throws Error(io).
  void add(const std::string& name, std::string_view content) const;
  /// Makes the names durable and renames the folder. Throws Error(io).
  void finish();

 private:
  void make();
  void check_space(Bytes needed) const;

  std::filesystem::path folder_;
  std::filesystem::path temporary_;
  Descriptor in_use_;  ///< holds a lock on the temporary folder, which ends with the process
  std::optional<MadeDirectory> parent_;  ///< removed if the folder is not finished
  bool finished_ = false;
};

}  // namespace ballast::formats
