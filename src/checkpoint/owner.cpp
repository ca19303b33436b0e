#include "src/checkpoint/owner.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"

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

}  // namespace ballast::checkpoint
