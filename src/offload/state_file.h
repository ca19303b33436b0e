#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "src/offload/optimizer.h"

namespace ballast::offload {

/// Entries of a state file that the caller keeps there.
using Notes = std::map<std::string, std::string>;

/// Writes the states of all parameters to a safetensors file, piece by piece: "N.master" of 16-bit
/// parameter N, "N.exp_avg", "N.exp_avg_sq", in fp32, or bf16 where the moments have no more bits.
/// The file replaces one of that name when it is complete. `weights`: of each parameter. Throws
/// Error(io) and those of OffloadedOptimizer::begin().
void save_states(OffloadedOptimizer& states, std::span<void* const> weights,
                 const std::filesystem::path& file, const Notes& notes);

/// Reads what save_states() has written, also with another place or other sub-groups, and sets
/// 16-bit weights from their masters. Returns the notes. Throws Error(data) naming the file and
/// what does not match, before anything changes; Error(io).
Notes load_states(OffloadedOptimizer& states, std::span<void* const> weights,
                  const std::filesystem::path& file);

/// The notes alone. Throws Error(data), Error(io).
Notes read_notes(const std::filesystem::path& file);

}  // namespace ballast::offload
