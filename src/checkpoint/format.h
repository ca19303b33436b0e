#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/view.h"
#include "ballast/engine/saved_states.h"
#include "ballast/text/json.h"

namespace ballast::checkpoint {

inline constexpr std::uint64_t kCheckpointVersion = 1;
/// Bytes of a state file per checksum.
inline constexpr Bytes kCheckpointChunk = 1 * kMiB;

/// Throws Error(data) with `path` and the problem `what`.
[[noreturn]] void refuse_checkpoint(const std::filesystem::path& path, const std::string& what);

/// Returns `path` without "." and without a trailing slash, so that it ends in a name.
std::filesystem::path absolute_of(const std::filesystem::path& path);

/// Throws Error(io) with the reason why the undamaged `path` cannot be used, and a remedy.
[[noreturn]] void refuse_unreadable(const std::filesystem::path& path, const std::string& what);
/// Calls `work`, which reads files of a checkpoint. A missing or truncated file is damage. Other
/// failures of system calls (EACCES, EIO, EMFILE, ELOOP, ...) are not: they become an Error(io)
/// with a remedy.
void reading(const std::function<void()>& work);
/// Returns whether `path` exists. Throws Error(io) if this cannot be determined.
bool can_be_found(const std::filesystem::path& path);

/// XXH3 as 16 hexadecimal digits.
std::string checksum_text(ConstHostBytes bytes);
std::string checksum_text(const std::string& text);

/// Returns the text of a file with `content` and its checksum.
std::string seal(const text::Json& content);
/// Returns the content of such a file. Throws Error(data) with the file if it is missing, damaged,
/// or of a newer version.
text::Json read_sealed(const std::filesystem::path& path);

/// Returns the whole number `key` of `object`. Throws Error(data) with `path`.
std::uint64_t whole_of(const text::Json& object, std::string_view key,
                       const std::filesystem::path& path);

/// Returns the elements of array `key` of `object`. Throws Error(data) with `path`.
const std::vector<text::Json>& array_of(const text::Json& object, std::string_view key,
                                        const std::filesystem::path& path);

/// Returns [block, kind, first, count, width].
text::Json json_of(const engine::StateRange& range);
/// Reads a range from the first elements of `json`. Throws Error(data) with `path`.
engine::StateRange range_of(const text::Json& json, const std::filesystem::path& path);
/// Converts facts to the beginning of the content of checkpoint.json, and back. Throws like
/// whole_of().
text::Json json_of(const CheckpointFacts& facts);
CheckpointFacts facts_of(const text::Json& content, const std::filesystem::path& path);

std::filesystem::path states_file(const std::filesystem::path& folder, std::uint32_t rank);
std::filesystem::path ranges_file(const std::filesystem::path& folder, std::uint32_t rank);
std::filesystem::path facts_file(const std::filesystem::path& folder);

std::filesystem::path checkpoint_folder(const std::filesystem::path& run, std::uint64_t step);
/// Returns N for a folder step-N.
std::optional<std::uint64_t> step_of(const std::filesystem::path& folder);

}  // namespace ballast::checkpoint
