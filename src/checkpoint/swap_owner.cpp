#include "src/checkpoint/swap_owner.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kOwnedPrefix = "ballast-run-";
constexpr std::string_view kOldPrefix = "ballast-";
constexpr std::string_view kRecord = ".json";
constexpr std::size_t kIdDigits = 16;

/// Takes parts from the beginning of a name.
class NameParts {
 public:
  explicit NameParts(std::string_view name) : rest_(name) {}

  bool skip(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  template <class Number>
  bool take(Number& number) {
    const char* const end = rest_.data() + rest_.size();
    const auto [rest, error] = std::from_chars(rest_.data(), end, number);
    rest_.remove_prefix(static_cast<std::size_t>(rest - rest_.data()));
    return error == std::errc();
  }
  bool take_id(std::string& id) {
    id = rest_.substr(0, kIdDigits);
    rest_.remove_prefix(id.size());
    return id.size() == kIdDigits && id.find_first_not_of("0123456789abcdef") == std::string::npos;
  }
  [[nodiscard]] bool ended() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

bool is_same_file(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

/// Returns how many names that `counts` accepts the file `status` has in `folder`.
template <class Counts>
std::uint64_t names_in(const fs::path& folder, const struct stat& status, const Counts& counts) {
  std::uint64_t found = 0;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    struct stat here {};
    if (::lstat(entry->path().c_str(), &here) != 0 || !is_same_file(here, status)) continue;
    if (counts(entry->path())) ++found;
  }
  return found;
}

/// Returns whether `file` has the name of a swap file in the folder of its checkpoint.
bool is_inside_name(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.starts_with("rank-") && name.find(".swap-") != std::string::npos;
}

/// Returns how many names the checkpoints of `run` give to the file `status` in their folders.
std::uint64_t names_in_checkpoints(const fs::path& run, const struct stat& status) {
  std::uint64_t found = 0;
  std::error_code error;
  for (fs::directory_iterator entry(run / kCheckpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    if (!entry->is_directory(ignored) || entry->is_symlink(ignored)) continue;
    found += names_in(entry->path(), status, is_inside_name);
  }
  return found;
}

/// Returns whether the checkpoint records that this run has written it.
bool is_written_by(const fs::path& folder, const RunOwner& owner) {
  const auto recorded = read_owner(facts_file(folder));
  return recorded && recorded->is_same(owner);
}

/// Returns whether `folder` is the folder of a checkpoint in the run directory `owner` itself, not
/// in another place to which a symbolic link leads.
bool is_inside(const fs::path& folder, const RunOwner& owner) {
  std::error_code error;
  const fs::path place = fs::canonical(folder, error);
  return !error && place.parent_path() == owner.path / kCheckpoints;
}

}  // namespace

std::optional<SwapName> parse_swap_name(const std::string& name) {
  NameParts parts(name);
  SwapName found;
  std::uint32_t path = 0;
  const bool whole = parts.skip(kOwnedPrefix) && parts.take_id(found.id) && parts.skip("-step-") &&
                     parts.take(found.step) && parts.skip("-rank-") && parts.take(found.rank) &&
                     parts.skip(".swap-") && parts.take(path) && parts.ended();
  return whole ? std::optional(found) : std::nullopt;
}

bool is_old_swap_name(const std::string& name) {
  NameParts parts(name);
  std::string id;
  std::uint32_t number = 0;
  return parts.skip(kOldPrefix) && parts.take_id(id) && parts.skip("-rank-") &&
         parts.take(number) && parts.skip(".swap-") && parts.take(number) && parts.ended();
}

std::string swap_name(std::uint32_t rank) {
  return fmt::format("rank-{}.swap", rank);
}

std::string swap_name_elsewhere(const RunOwner& owner, const fs::path& folder, std::uint32_t rank) {
  return fmt::format("{}{}-{}-{}", kOwnedPrefix, owner.id(), folder.filename().string(),
                     swap_name(rank));
}

fs::path owner_record(const fs::path& directory, const std::string& id) {
  return directory / fmt::format("{}{}{}", kOwnedPrefix, id, kRecord);
}

std::string record_id(const std::string& name) {
  NameParts parts(name);
  std::string id;
  const bool whole =
      parts.skip(kOwnedPrefix) && parts.take_id(id) && parts.skip(kRecord) && parts.ended();
  return whole ? id : "";
}

std::optional<RunOwner> recorded_owner(const fs::path& directory, const std::string& id) {
  const auto owner = read_owner(owner_record(directory, id));
  return owner && owner->id() == id ? owner : std::nullopt;
}

void record_owner(const fs::path& directory, const RunOwner& owner) {
  write_owner(owner_record(directory, owner.id()), owner);
}

void remove_unused_record(const fs::path& directory, const RunOwner& owner) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const auto name = parse_swap_name(entry->path().filename().string());
    if (name && name->id == owner.id()) return;
  }
  std::error_code ignored;
  if (!error) fs::remove(owner_record(directory, owner.id()), ignored);
}

bool is_owned(const fs::path& file, const RunOwner& owner) {
  const auto name = parse_swap_name(file.filename().string());
  struct stat status {};
  if (!name || ::lstat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
  if (name->id == owner.id()) return true;
  const auto recorded = recorded_owner(file.parent_path(), name->id);
  return recorded && recorded->is_same(owner);
}

bool may_write_to(const engine::KeptStates& kept, const fs::path& run) {
  const auto owner = owner_of(run);
  if (!owner) return false;
  const auto may = [&](const fs::path& file) {
    struct stat status {};
    if (::lstat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
    if (is_inside_name(file)) {
      return is_inside(file.parent_path(), *owner) &&
             names_in_checkpoints(run, status) == status.st_nlink;
    }
    const auto owned = [&](const fs::path& name) { return is_owned(name, *owner); };
    return owned(file) && names_in(file.parent_path(), status, owned) == status.st_nlink;
  };
  return std::all_of(kept.image.files.begin(), kept.image.files.end(), may);
}

std::string why_not_own(const engine::KeptStates& kept, const fs::path& run) {
  const auto owner = owner_of(run);
  for (const fs::path& file : kept.image.files) {
    const auto name = parse_swap_name(file.filename().string());
    if (is_inside_name(file) || (owner && is_owned(file, *owner))) continue;
    const std::string list =
        fmt::format("'ballast inspect --swap {}' lists them", file.parent_path().string());
    const auto other = name ? recorded_owner(file.parent_path(), name->id) : std::nullopt;
    if (!other) return fmt::format("they are in swap files that do not name their run; {}", list);
    const Whereabouts found = find_owner(*other);
    if (found.state == Whereabouts::State::there) {
      return fmt::format("they are in swap files of the run {}", found.path.string());
    }
    return fmt::format("they are in swap files of the run {}, which is not there; {}",
                       other->path.string(), list);
  }
  return "their swap files have names outside of this run directory, such as those of 'cp -al'";
}

void refuse_foreign_checkpoints(const fs::path& run) {
  const auto owner = owner_of(run);
  std::error_code error;
  const fs::path place = fs::canonical(run / kCheckpoints, error);
  if (!owner || error || place == owner->path / kCheckpoints) return;
  for (const fs::path& folder : checkpoints_of(run)) {
    if (is_written_by(folder, *owner)) continue;
    throw Error(
        ErrorCategory::usage,
        fmt::format("{} is a symbolic link to {}, and {} there is not known to be of this run, "
                    "which would remove it; give this run its own: rm {} && cp -a {} {}",
                    (run / kCheckpoints).string(), place.string(), folder.filename().string(),
                    (run / kCheckpoints).string(), place.string(), (run / kCheckpoints).string()));
  }
}

fs::path run_of(const fs::path& folder) {
  return folder.parent_path().parent_path();
}

std::optional<std::uint64_t> step_in_name(const fs::path& folder) {
  constexpr std::string_view kStep = "step-";
  const std::string name = folder.filename().string();
  const std::size_t at = name.find(kStep);
  std::uint64_t step = 0;
  if (at == std::string::npos || !NameParts(name.substr(at + kStep.size())).take(step)) {
    return std::nullopt;
  }
  return step;
}

}  // namespace ballast::checkpoint
