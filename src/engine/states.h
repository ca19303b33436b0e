#pragma once

#include <cstdint>
#include <vector>

#include "ballast/engine/engine.h"

#include "src/engine/step.h"

namespace ballast::engine {

/// Writes the initial states of every block to their homes: weights from `source` (from the
/// seed when empty), moments zero. Nothing may be running.
void initialize_states(Machine& machine, const WeightSource& source);

/// fp32 master weights of `tensor` in block `block`. Nothing may be running.
std::vector<float> read_master(Machine& machine, std::size_t block,
                               const model::TensorSpec& tensor);

/// XXH3 over weights and states of all blocks in order. Nothing may be running.
std::uint64_t hash_states(Machine& machine);

}  // namespace ballast::engine
