#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/engine/run_states.h"
#include "ballast/model/lora.h"
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

// A checkpoint stores the adapters and the quantised base of its run as JSON objects, and a resumed
// run compares them field by field. Names and values of fields must never change.

namespace ballast::checkpoint {

/// Returns all settings of the adapters, with targets and modules in alphabetical order; null
/// without adapters.
text::Json identity_of(const std::optional<model::AdapterConfig>& adapters);
/// Returns the format of the frozen matrices; null if they are not quantised.
text::Json identity_of(const std::optional<model::Quantization>& base);

/// Converts the adapters stored in a checkpoint (nullptr: none) to the form of identity_of(). Also
/// parses the sentences in old checkpoints: "rank 8, alpha 16 (rsLoRA), for q_proj, v_proj". Throws
/// Error(data) with `path`.
text::Json read_adapters(const text::Json* stored, const std::filesystem::path& path);
/// Reads the quantised base, including the old sentence "nf4 with scales in 8 bits".
text::Json read_quantization(const text::Json* stored, const std::filesystem::path& path);

/// Throws Error(data) that begins with `folder` and gives the first field that differs, if the
/// adapters of a checkpoint compute another model than those `here`. Dropout is ignored, and
/// modules_to_save is covered by the frozen tensors of each block.
void check_adapters(const std::filesystem::path& folder, const text::Json& stored,
                    const std::optional<model::AdapterConfig>& here);
/// Compares the quantised base like check_adapters().
void check_quantization(const std::filesystem::path& folder, const text::Json& stored,
                        const std::optional<model::Quantization>& here);

// The form of a portable checkpoint; see checkpoint.h.

/// Value of "format" in its checkpoint.json.
inline constexpr std::string_view kPortable = "portable";

/// Returns the file with the arrays of a block.
std::filesystem::path portable_file(const std::filesystem::path& folder, std::size_t block);

/// Returns "layer.0.first_moments" for the block "layer 0".
std::string state_tensor(const std::string& block, engine::StateKind kind);

/// Returns the safetensors dtype for entries of `width` bytes, which are stored bit by bit. Empty
/// if this kind cannot have that width. `weights`: the type of 2-byte weights.
std::string_view state_dtype(engine::StateKind kind, Bytes width, DType weights = DType::bf16);

}  // namespace ballast::checkpoint
