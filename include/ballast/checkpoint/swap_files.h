#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::checkpoint {

/// Use of a swap file that checkpoints have named outside of their run directories, or that a
/// crashed process has left.
enum class SwapUse : std::uint8_t {
  in_use,    ///< a process has locked it
  kept,      ///< a checkpoint refers to it
  leftover,  ///< its run exists, but none of its checkpoints refers to it
  unowned,   ///< its run does not exist, and no run that was found refers to it
  unknown    ///< it cannot be determined which run it belongs to, or whether that exists
};
/// Returns "in use", "kept", "leftover", "unowned" or "unknown".
std::string_view to_string(SwapUse use);

struct SwapFile {
  std::filesystem::path path;
  Bytes bytes = 0;  ///< size of the file; several names may be of the same file
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  SwapUse use = SwapUse::unknown;
  std::filesystem::path run;         ///< its run directory, perhaps a former one; "" if unknown
  bool run_exists = false;           ///< whether `run` is there
  std::filesystem::path checkpoint;  ///< folder of the checkpoint that refers to it; "": none
  std::string note;                  ///< reason for SwapUse::unknown
};

/// Lists the swap files with names in `directory`, in alphabetical order. A run directory is looked
/// for at its recorded path. Runs that were moved or copied since are found if they are below the
/// folder that contained the run, the one that contains `directory`, or the working directory, at
/// most three levels deep. As root, renamed ones are found everywhere on their file system. Throws
/// Error(io) if the directory cannot be listed.
std::vector<SwapFile> list_swap_files(const std::filesystem::path& directory);

/// Returns the space that `files` take: their sizes, those of several names of one file once.
Bytes space_of(const std::vector<SwapFile>& files);

/// Removes the unowned ones of `files`, a result of list_swap_files() for `directory`, unless a
/// process has begun to use them. Also removes records of runs that have no files there any more.
/// Returns the removed files. Throws Error(io) with the first that cannot be removed.
std::vector<SwapFile> remove_unowned(const std::filesystem::path& directory,
                                     const std::vector<SwapFile>& files);

/// Finds checkpoints that refer to swap files outside of their folders.
class RunSearch {
 public:
  struct Reference {
    std::filesystem::path run;
    std::filesystem::path folder;  ///< folder of the checkpoint
  };

  /// Adds the references of the run directory `run`.
  void add_run(const std::filesystem::path& run);
  /// Adds all runs below `place`, at most three levels deep. Does not follow symbolic links.
  void add_below(const std::filesystem::path& place);

  /// Returns the checkpoint that refers to the file; nullptr if none was found.
  [[nodiscard]] const Reference* find(const std::filesystem::path& file) const;
  /// False if a place has too many folders, so that runs may be missing.
  [[nodiscard]] bool complete() const { return complete_; }

 private:
  void walk(const std::filesystem::path& place, unsigned levels);

  std::set<std::pair<std::uint64_t, std::uint64_t>> seen_;  ///< device and inode of run directories
  std::map<std::filesystem::path, Reference> references_;   ///< by path without symbolic links
  std::size_t folders_ = 0;
  bool complete_ = true;
};

}  // namespace ballast::checkpoint
