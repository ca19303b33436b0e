#include "ballast/checkpoint/swap_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/text/files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/checkpoint/owner.h"

namespace ballast::checkpoint {

namespace {

namespace fs = std::filesystem;

/// Prefix of the names that swap files have between creation and unlink where the file system has
/// no unnamed files (aio::remove_leftovers()).
constexpr std::string_view kCrashed = ".ballast-swap-";

std::vector<fs::path> names_in(const fs::path& directory) {
  std::vector<fs::path> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    names.push_back(entry->path());
  }
  if (error) {
    throw Error(ErrorCategory::io, fmt::format("cannot list {}", directory.string()),
                error.value());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// An open swap file, and whether no process uses it. The lock is held until the end of the object.
class LockProbe {
 public:
  explicit LockProbe(const fs::path& file)
      : descriptor_(::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) {
    if (!descriptor_.is_open() || ::fstat(descriptor_.number(), &status_) != 0) return;
    is_file_ = S_ISREG(status_.st_mode);
    is_locked_ = is_file_ && ::flock(descriptor_.number(), LOCK_EX | LOCK_NB) == 0;
    is_busy_ = is_file_ && !is_locked_ && errno == EWOULDBLOCK;
  }
  [[nodiscard]] bool is_file() const { return is_file_; }
  [[nodiscard]] bool is_locked() const { return is_locked_; }
  [[nodiscard]] bool is_busy() const { return is_busy_; }
  [[nodiscard]] const struct stat& status() const { return status_; }

 private:
  Descriptor descriptor_;
  struct stat status_ {};
  bool is_file_ = false;
  bool is_locked_ = false;
  bool is_busy_ = false;
};

/// Owners of the runs with records in a directory, and the checkpoints that refer to files there.
struct KnownRuns {
  std::map<std::string, std::pair<RunOwner, Whereabouts>> runs;  ///< by id
  RunSearch search;
};

KnownRuns find_runs(const fs::path& directory, const std::vector<fs::path>& names) {
  KnownRuns known;
  std::set<fs::path> places = {fs::weakly_canonical(directory).parent_path()};
  std::error_code error;
  places.insert(fs::current_path(error));
  for (const fs::path& name : names) {
    const std::string id = record_id(name.filename().string());
    const auto owner = id.empty() ? std::nullopt : recorded_owner(directory, id);
    if (!owner) continue;
    Whereabouts found = find_owner(*owner);
    if (found.state == Whereabouts::State::there) known.search.add_run(found.path);
    places.insert(owner->path.parent_path());
    known.runs.emplace(id, std::pair(*owner, std::move(found)));
  }
  for (const fs::path& place : places) known.search.add_below(place);
  return known;
}

/// Describes a file that no checkpoint refers to.
void describe_unreferenced(const KnownRuns& known, const std::string& id, SwapFile& file) {
  const auto run = known.runs.find(id);
  if (run == known.runs.end()) {
    file.note = "nothing records its run";
    return;
  }
  using enum Whereabouts::State;
  const Whereabouts& found = run->second.second;
  if (found.state == there) {
    file.use = SwapUse::leftover;
  } else if (found.state == unknown) {
    file.note = "the file system of its run is not mounted, or has another number now";
  } else if (!known.search.complete()) {
    file.note = "its run is gone, but there are too many folders to look for copies of it";
  } else {
    file.use = SwapUse::unowned;
  }
}

/// Returns the description of the file `path`; none if it is not a swap file.
std::optional<SwapFile> describe(const KnownRuns& known, const fs::path& path) {
  const std::string name = path.filename().string();
  const auto parts = parse_swap_name(name);
  const bool crashed = name.starts_with(kCrashed);
  const bool old = is_old_swap_name(name);
  if (!parts && !crashed && !old) return std::nullopt;
  const LockProbe probe(path);
  if (!probe.is_file()) return std::nullopt;
  SwapFile file = {.path = path,
                   .bytes = static_cast<Bytes>(probe.status().st_size),
                   .device = probe.status().st_dev,
                   .inode = probe.status().st_ino};
  if (parts) {
    if (const auto run = known.runs.find(parts->id); run != known.runs.end()) {
      file.run = run->second.second.path;
      file.run_exists = run->second.second.state == Whereabouts::State::there;
    }
  }
  if (const auto* const reference = known.search.find(path)) {
    file.use = SwapUse::kept;
    file.run = reference->run;
    file.run_exists = true;
    file.checkpoint = reference->folder;
  } else if (crashed) {
    file.use = probe.is_locked() && probe.status().st_uid == ::geteuid() ? SwapUse::unowned
                                                                         : SwapUse::unknown;
    if (file.use == SwapUse::unknown) file.note = "it cannot be locked, or is another user's";
  } else if (old) {
    file.note = "an older version wrote it and did not record its run";
  } else {
    describe_unreferenced(known, parts->id, file);
  }
  if (probe.is_busy()) file.use = SwapUse::in_use;
  return file;
}

/// Removes the file unless a process uses it. Returns whether it is removed. The lock is held from
/// the check to the unlink.
bool remove_one(const fs::path& path) {
  const LockProbe probe(path);
  struct stat now {};
  if (!probe.is_locked() || ::lstat(path.c_str(), &now) != 0) return false;
  if (now.st_ino != probe.status().st_ino || now.st_dev != probe.status().st_dev) return false;
  if (::unlink(path.c_str()) == 0) return true;
  throw Error(ErrorCategory::io, fmt::format("cannot remove {}", path.string()), errno);
}

/// Removes records of runs that do not exist and have no file in `directory`.
void remove_records(const fs::path& directory) {
  const std::vector<fs::path> names = names_in(directory);
  std::set<std::string> used;
  for (const fs::path& name : names) {
    if (const auto parts = parse_swap_name(name.filename().string())) used.insert(parts->id);
  }
  for (const fs::path& name : names) {
    const std::string id = record_id(name.filename().string());
    const auto owner = id.empty() ? std::nullopt : recorded_owner(directory, id);
    if (!owner || used.contains(id)) continue;
    std::error_code ignored;
    if (find_owner(*owner).state == Whereabouts::State::gone) fs::remove(name, ignored);
  }
}

}  // namespace

std::string_view to_string(SwapUse use) {
  switch (use) {
    case SwapUse::in_use:
      return "in use";
    case SwapUse::kept:
      return "kept";
    case SwapUse::leftover:
      return "leftover";
    case SwapUse::unowned:
      return "unowned";
    case SwapUse::unknown:
      return "unknown";
  }
  return "";
}

std::vector<SwapFile> list_swap_files(const fs::path& directory) {
  const std::vector<fs::path> names = names_in(directory);
  const KnownRuns known = find_runs(directory, names);
  std::vector<SwapFile> files;
  for (const fs::path& name : names) {
    if (auto file = describe(known, name)) files.push_back(std::move(*file));
  }
  return files;
}

Bytes space_of(const std::vector<SwapFile>& files) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  Bytes sum = 0;
  for (const SwapFile& file : files) {
    if (seen.emplace(file.device, file.inode).second) sum += file.bytes;
  }
  return sum;
}

std::vector<SwapFile> remove_unowned(const fs::path& directory,
                                     const std::vector<SwapFile>& files) {
  std::vector<SwapFile> removed;
  for (const SwapFile& file : files) {
    if (file.use == SwapUse::unowned && remove_one(file.path)) removed.push_back(file);
  }
  remove_records(directory);
  text::try_to_sync_name(directory / "");
  return removed;
}

namespace {

namespace fs = std::filesystem;

constexpr unsigned kLevels = 3;
constexpr std::size_t kMaxFolders = 200'000;

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
    if (++folders_ > kMaxFolders) {
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
