#include "src/checkpoint/owner.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/text/files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"

namespace ballast::checkpoint {

namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::int64_t kNanoseconds = 1'000'000'000;

/// Memory of a file handle with its variable part.
struct HandleBuffer {
  HandleBuffer() : bytes(sizeof(file_handle) + MAX_HANDLE_SZ) {
    get()->handle_bytes = MAX_HANDLE_SZ;
  }
  [[nodiscard]] file_handle* get() { return reinterpret_cast<file_handle*>(bytes.data()); }
  std::vector<unsigned char> bytes;  ///< the allocator aligns it for every type
};

std::string handle_of(const fs::path& path) {
  HandleBuffer buffer;
  int mount = 0;
  if (::name_to_handle_at(AT_FDCWD, path.c_str(), buffer.get(), &mount, 0) != 0) return "";
  std::string text = fmt::format("{:08x}", static_cast<unsigned>(buffer.get()->handle_type));
  for (unsigned i = 0; i < buffer.get()->handle_bytes; ++i) {
    text += fmt::format("{:02x}", buffer.get()->f_handle[i]);
  }
  return text;
}

/// Fills `buffer` from the result of handle_of(). Returns false if it is malformed.
bool read_handle(std::string_view text, HandleBuffer& buffer) {
  constexpr std::size_t kType = 8;
  const auto number = [text](std::size_t at, std::size_t digits, unsigned& value) {
    const char* const end = text.data() + at + digits;
    const auto [rest, error] = std::from_chars(text.data() + at, end, value, 16);
    return error == std::errc() && rest == end;
  };
  if (text.size() <= kType || text.size() % 2 != 0) return false;
  const std::size_t bytes = (text.size() - kType) / 2;
  unsigned value = 0;
  if (bytes > MAX_HANDLE_SZ || !number(0, kType, value)) return false;
  buffer.get()->handle_type = static_cast<int>(value);
  buffer.get()->handle_bytes = static_cast<unsigned>(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (!number(kType + 2 * i, 2, value)) return false;
    buffer.get()->f_handle[i] = static_cast<unsigned char>(value);
  }
  return true;
}

std::optional<RunOwner> describe(int directory, const char* path) {
  struct statx status {};
  const int flags = *path == '\0' ? AT_EMPTY_PATH : 0;
  if (::statx(directory, path, flags, STATX_TYPE | STATX_INO | STATX_BTIME, &status) != 0 ||
      !S_ISDIR(status.stx_mode)) {
    return std::nullopt;
  }
  RunOwner owner;
  owner.device = ::makedev(status.stx_dev_major, status.stx_dev_minor);
  owner.inode = status.stx_ino;
  if ((status.stx_mask & STATX_BTIME) != 0) {
    owner.birth = status.stx_btime.tv_sec * kNanoseconds + status.stx_btime.tv_nsec;
  }
  return owner;
}

/// Returns inode and birth of the folder that contains `path`.
std::string parent_of(const fs::path& path) {
  const auto parent = describe(AT_FDCWD, path.parent_path().c_str());
  return parent && parent->birth != 0 ? fmt::format("{} {}", parent->inode, parent->birth) : "";
}

/// Returns the path of the directory with the handle of `owner`, if it exists and this process may
/// open it. `anchor`: a directory on the same file system.
std::optional<fs::path> find_by_handle(const RunOwner& owner, const fs::path& anchor) {
  HandleBuffer handle;
  if (!read_handle(owner.handle, handle)) return std::nullopt;
  const Descriptor mount(::open(anchor.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!mount.is_open()) return std::nullopt;
  const Descriptor found(
      ::open_by_handle_at(mount.number(), handle.get(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  struct stat status {};
  if (!found.is_open() || ::fstat(found.number(), &status) != 0 || status.st_nlink == 0) {
    return std::nullopt;
  }
  const auto now = describe(found.number(), "");
  if (!now || now->inode != owner.inode || now->birth != owner.birth) return std::nullopt;
  std::error_code error;
  fs::path name = fs::read_symlink(fmt::format("/proc/self/fd/{}", found.number()), error);
  return error ? owner.path : name;
}

}  // namespace

std::string RunOwner::id() const {
  return checksum_text(fmt::format("{} {} {}", device, inode, birth));
}

bool RunOwner::is_same(const RunOwner& other) const {
  return inode == other.inode && birth == other.birth &&
         (device == other.device || path == other.path);
}

std::optional<RunOwner> owner_of(const fs::path& run) {
  std::optional<RunOwner> owner = describe(AT_FDCWD, run.empty() ? "." : run.c_str());
  if (!owner) return std::nullopt;
  std::error_code error;
  owner->path = fs::canonical(run.empty() ? "." : run, error);
  if (error) owner->path = fs::absolute(run, error);
  owner->handle = handle_of(owner->path);
  owner->parent = parent_of(owner->path);
  return owner;
}

Json json_of(const RunOwner& owner) {
  return Json::object({{"path", owner.path.string()},
                       {"device", owner.device},
                       {"inode", owner.inode},
                       {"birth", std::to_string(owner.birth)},
                       {"handle", owner.handle},
                       {"parent", owner.parent}});
}

std::optional<RunOwner> owner_from(const Json& json) {
  if (!json.is_object()) return std::nullopt;
  const auto text = [&](std::string_view key) -> std::optional<std::string> {
    const Json* const value = json.find(key);
    if (value == nullptr || !value->is_string()) return std::nullopt;
    return value->text();
  };
  const auto number = [&](std::string_view key) -> std::optional<std::uint64_t> {
    const Json* const value = json.find(key);
    return value == nullptr || !value->is_number() ? std::nullopt : value->whole();
  };
  const auto path = text("path");
  const auto device = number("device");
  const auto inode = number("inode");
  const auto birth = text("birth");
  if (!path || !device || !inode || !birth || !fs::path(*path).is_absolute()) return std::nullopt;
  RunOwner owner = {.path = *path,
                    .device = *device,
                    .inode = *inode,
                    .handle = text("handle").value_or(""),
                    .parent = text("parent").value_or("")};
  const char* const end = birth->data() + birth->size();
  const auto [rest, error] = std::from_chars(birth->data(), end, owner.birth);
  if (error != std::errc() || rest != end) return std::nullopt;
  return owner;
}

void write_owner(const fs::path& file, const RunOwner& owner) {
  const auto before = read_owner(file);
  if (before && json_of(*before).compact() == json_of(owner).compact()) return;
  text::ReplacedFile record(file);
  record.write(seal(Json::object({{"version", kCheckpointVersion}, {"run", json_of(owner)}})));
  record.commit();
}

std::optional<RunOwner> read_owner(const fs::path& file) {
  try {
    const Json json = read_sealed(file);
    const Json* const run = json.find("run");
    return run == nullptr ? std::nullopt : owner_from(*run);
  } catch (const Error&) {
    return std::nullopt;
  }
}

Whereabouts find_owner(const RunOwner& owner) {
  using enum Whereabouts::State;
  const auto now = owner_of(owner.path);
  if (now && now->is_same(owner)) return {there, owner.path};
  fs::path place = owner.path;
  std::error_code error;
  while (!fs::is_directory(place, error) && place.has_relative_path()) {
    const bool missing = !error || error == std::errc::no_such_file_or_directory ||
                         error == std::errc::not_a_directory;
    if (!missing) return {unknown, owner.path};
    place = place.parent_path();
  }
  // The number of the device may be another since the machine was restarted.
  const auto here = describe(AT_FDCWD, place.c_str());
  const bool same_parent = !owner.parent.empty() && parent_of(owner.path) == owner.parent;
  if (!here || (here->device != owner.device && !same_parent)) return {unknown, owner.path};
  if (const auto found = find_by_handle(owner, place)) return {there, *found};
  return {gone, owner.path};
}

namespace {

namespace fs = std::filesystem;

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
