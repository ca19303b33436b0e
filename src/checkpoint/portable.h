#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/engine/saved_states.h"

namespace ballast::checkpoint {

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
