#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "src/offload/optimizer.h"

namespace ballast::offload {

/// Entries of a state file that the caller keeps there.
using Notes = std::map<std::string, std::string>;

/// A parameter whose states are in a file. `states` and `weights` are the caller's.
struct FiledParameter {
  std::string name;  ///< its tensors are called "NAME.master", "NAME.exp_avg" and "NAME.exp_avg_sq"
  OffloadedOptimizer* states = nullptr;
  std::size_t parameter = 0;
  void* weights = nullptr;
};

/// Writes states to a safetensors file, piece by piece: the master of 16-bit parameters and the
/// moments, in fp32, or bf16 where the moments have no more bits; and the XXH3 of each. All states
/// have the same optimizer and no two parameters the same name. The file replaces one of that name
/// when it is complete. Throws Error(io) and those of OffloadedOptimizer::begin().
void save_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file,
                 const Notes& notes);

/// Reads what save_states() has written of these parameters, also with another place, other
/// sub-groups or another type of the weights, and sets 16-bit weights from their masters. Without a
/// master in the file, the weights become the master. Throws Error(data) naming the file and what
/// does not match or is damaged, before anything changes; Error(io).
void load_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file);

/// The notes of a file. Throws Error(data), also if they are damaged; Error(io).
Notes read_notes(const std::filesystem::path& file);

}  // namespace ballast::offload
