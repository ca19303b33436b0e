#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/text/json.h"

namespace ballast::checkpoint {

/// A run directory as its files elsewhere describe it. A renamed directory keeps device, inode and
/// time of birth. A copy has others.
struct RunOwner {
  std::filesystem::path path;  ///< absolute, without symbolic links
  std::uint64_t device = 0;    ///< may be another after a restart of the machine
  std::uint64_t inode = 0;
  std::int64_t birth = 0;  ///< nanoseconds since 1970; 0 if the file system does not record it
  std::string handle;      ///< see name_to_handle_at(2), in hexadecimal digits; "" if there is none
  std::string parent;      ///< inode and birth of the folder that contains it; "" if unknown

  /// Returns 16 hexadecimal digits that another directory does not have.
  [[nodiscard]] std::string id() const;
  /// Returns whether both describe the same directory, perhaps under another name. A directory
  /// whose device has another number now must have the same path.
  [[nodiscard]] bool is_same(const RunOwner& other) const;
};

/// Describes the directory `run`. None if it does not exist.
std::optional<RunOwner> owner_of(const std::filesystem::path& run);

text::Json json_of(const RunOwner& owner);
/// Reads the result of json_of(). None if it is malformed.
std::optional<RunOwner> owner_from(const text::Json& json);

/// Writes a record of `owner` to `file`, unless it is there. It is on the disk when this returns.
/// Throws Error(io).
void write_owner(const std::filesystem::path& file, const RunOwner& owner);
/// Returns the owner in such a record. None if it is missing or damaged.
std::optional<RunOwner> read_owner(const std::filesystem::path& file);

/// The present state of a recorded run directory.
struct Whereabouts {
  enum class State : std::uint8_t {
    there,   ///< it is at `path`
    gone,    ///< not at its path; it was deleted, renamed, or moved to another file system
    unknown  ///< its file system is not mounted, or its path cannot be accessed
  };
  State state = State::unknown;
  std::filesystem::path path;
};

/// Looks for a run directory at its recorded path. As root, also finds it under another name.
Whereabouts find_owner(const RunOwner& owner);

}  // namespace ballast::checkpoint
