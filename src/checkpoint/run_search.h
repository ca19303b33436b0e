#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

namespace ballast::checkpoint {

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
