#include "src/checkpoint/run_search.h"

#include <cstdint>
#include <system_error>
#include <vector>

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/owner.h"
#include "src/checkpoint/swap.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kLevels = 3;
constexpr std::size_t kMostFolders = 200'000;

/// Returns the path of a file without symbolic links in its folders.
fs::path place_of(const fs::path& file) {
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(file.parent_path(), error);
  return (error ? file.parent_path() : folder) / file.filename();
}

}  // namespace

void RunSearch::add_run(const fs::path& run) {
  const auto owner = owner_of(run);
  if (!owner || !seen_.emplace(owner->device, owner->inode).second) return;
  for (const fs::path& folder : all_folders(run)) {
    for (const fs::path& file : files_elsewhere(folder)) {
      references_.emplace(place_of(file), Reference{run, folder});
    }
  }
}

void RunSearch::add_below(const fs::path& place) {
  folders_ = 0;
  std::error_code error;
  walk(fs::canonical(place, error), kLevels);
}

void RunSearch::walk(const fs::path& place, unsigned levels) {
  std::error_code error;
  if (place == "/proc" || place == "/sys" || place.empty()) return;
  if (fs::is_directory(place / kCheckpoints, error)) return add_run(place);
  if (levels == 0) return;
  for (fs::directory_iterator entry(place, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored) || !entry->is_directory(ignored)) continue;
    if (++folders_ > kMostFolders) {
      complete_ = false;
      return;
    }
    walk(entry->path(), levels - 1);
  }
}

const RunSearch::Reference* RunSearch::find(const fs::path& file) const {
  const auto found = references_.find(place_of(file));
  return found == references_.end() ? nullptr : &found->second;
}

}  // namespace ballast::checkpoint
