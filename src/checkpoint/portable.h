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

/// "format" in its checkpoint.json.
inline constexpr std::string_view kPortable = "portable";

/// The file of the arrays of a block.
std::filesystem::path portable_file(const std::filesystem::path& folder, std::size_t block);

/// "layer.0.first_moments", for the block named "layer 0".
std::string state_tensor(const std::string& block, engine::StateKind kind);

/// dtype of safetensors of entries of `width` bytes: the bits as they are. Empty for widths that
/// this kind does not have. `weights`: which 16-bit type those of 2 bytes are.
std::string_view state_dtype(engine::StateKind kind, Bytes width, DType weights = DType::bf16);

}  // namespace ballast::checkpoint
