#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "ballast/engine/run_states.h"
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

// Swap files of checkpoints that are next to the swap files of other runs. Their names contain the
// RunOwner::id() of their run, and a record with that id describes the run:
//   ballast-run-ID-step-N-rank-R.swap-P
//   ballast-run-ID.json
// A run removes and overwrites only files that are proven to be its own. A copy of a run directory
// lists the files of the original, but it is another directory, so it only reads them.

/// Parts of such a name.
struct SwapName {
  std::string id;
  std::uint64_t step = 0;
  std::uint32_t rank = 0;
};

/// Returns the parts of a name. None for names of other files, such as those that older versions
/// have given (is_old_swap_name()).
std::optional<SwapName> parse_swap_name(const std::string& name);
/// Returns whether `name` has the form ballast-ID-rank-R.swap-P of older versions, which does not
/// tell a copy of a run from the original.
bool is_old_swap_name(const std::string& name);
/// Returns the name of a rank's swap files in the folder of a checkpoint, without -P.
std::string swap_name(std::uint32_t rank);
/// Returns the name of a rank's swap files for the checkpoint `folder` of `owner`, without -P.
std::string swap_name_elsewhere(const RunOwner& owner, const std::filesystem::path& folder,
                                std::uint32_t rank);

/// Writes the record of `owner` to `directory` unless it is there. It is on the disk when this
/// returns. Throws Error(io).
void record_owner(const std::filesystem::path& directory, const RunOwner& owner);
/// Returns the record of the run `id` in `directory`. None if it is missing or damaged.
std::optional<RunOwner> recorded_owner(const std::filesystem::path& directory,
                                       const std::string& id);
/// Removes the record of `owner` in `directory` if no file there has its id.
void remove_unused_record(const std::filesystem::path& directory, const RunOwner& owner);
/// Returns the path of this record.
std::filesystem::path owner_record(const std::filesystem::path& directory, const std::string& id);
/// Returns the id in the name of a record; "" for other names.
std::string record_id(const std::string& name);

/// Returns whether the swap file `file`, which has a name outside of the run directory `owner`,
/// belongs to that directory.
bool is_owned(const std::filesystem::path& file, const RunOwner& owner);
/// Returns whether the run directory `run` may write to the swap files `kept` of one of its
/// checkpoints: they are its own, and nothing but its checkpoints gives them a name. `cp -al`, for
/// example, gives them names in another directory.
bool may_write_to(const engine::KeptStates& kept, const std::filesystem::path& run);

/// Returns the reason why may_write_to() is false, for the end of a sentence: "they are in swap
/// files of the run DIR".
std::string why_not_own(const engine::KeptStates& kept, const std::filesystem::path& run);

/// Throws Error(usage) if the folder of checkpoints of `run` is elsewhere (a symbolic link) and has
/// checkpoints that are not proven to be of this run, which would remove them.
void refuse_foreign_checkpoints(const std::filesystem::path& run);

/// Returns the run directory of the checkpoint `folder`, which is or was called step-N.
std::filesystem::path run_of(const std::filesystem::path& folder);
/// Returns N of a folder called step-N, or the same with a prefix or suffix.
std::optional<std::uint64_t> step_in_name(const std::filesystem::path& folder);

}  // namespace ballast::checkpoint
