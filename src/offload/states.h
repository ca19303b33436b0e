#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "src/offload/optimizer.h"

namespace ballast::offload {

/// Values of one parameter, or of one part, in fp32. Each span has one value per element, or is
/// empty.
struct StateValues {
  std::span<float> master;  ///< only for a 16-bit parameter
  std::span<float> first;
  std::span<float> second;
};

/// Copies states of a part out. Moments that the optimizer does not keep are left unchanged.
void read_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                 const StateValues& values);
/// Copies states of a part in. See cpu_adam::write_moments() and write_master().
void write_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                  const StateValues& values, NewMaster mode = NewMaster::sets_weights);

/// The overloads below do this for a whole parameter. Throw like OffloadedOptimizer::begin().
void read_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                 const StateValues& values);
void write_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                  const StateValues& values, NewMaster mode = NewMaster::sets_weights);

/// Copies the states of one parameter to another one with the same number of elements and the same
/// optimizer, part by part, with the master if both have the same type. The objects must differ.
/// Throws like OffloadedOptimizer::begin().
void copy_states(OffloadedOptimizer& from, std::size_t parameter, OffloadedOptimizer& to,
                 std::size_t target);

/// Entries of a state file that belong to the caller.
using Notes = std::map<std::string, std::string>;

/// A parameter whose states are in a file. The caller owns `states` and `weights`.
struct FiledParameter {
  std::string name;  ///< its tensors are "NAME.master", "NAME.exp_avg" and "NAME.exp_avg_sq"
  OffloadedOptimizer* states = nullptr;
  std::size_t parameter = 0;
  void* weights = nullptr;
};

/// Writes states to a safetensors file, piece by piece: the master of 16-bit parameters and the
/// moments, in fp32, or in bf16 if the moments have no more bits; and the XXH3 of each. All states
/// must have the same optimizer, and parameters different names. The file replaces an existing one
/// when it is complete. Throws Error(io) and those of OffloadedOptimizer::begin().
void save_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file,
                 const Notes& notes);

/// Reads the states that save_states() wrote for these parameters, possibly with another place,
/// other sub-groups or another weight type, and sets 16-bit weights from their masters. Without a
/// master in the file, the weights become the master. Throws Error(data) with the file and what
/// does not match or is damaged, before anything changes; Error(io).
void load_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file);

/// Returns the notes of a file. Throws Error(data), also if they are damaged; Error(io).
Notes read_notes(const std::filesystem::path& file);

}  // namespace ballast::offload
