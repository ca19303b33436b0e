#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/units.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/cpu_adam/weight_checks.h"

namespace ballast::offload {

// The fp32 masters of 16-bit weights that another program may change. A bf16 master is the weight
// and a 16-bit remainder. The check values of the weights that the remainders belong to show later
// which weights were changed, so that weights which were changed and put back keep their masters.
// An fp16 master is complete, and each weight is compared with its rounded master. fp32 weights
// have no master. `first` is a multiple of cpu_adam::WeightChecks::kBlock, and `count` too except
// at the end of a part.

/// The arrays of a part: those of an update, and the check values of bf16 weights.
struct PartStates {
  cpu_adam::Shard shard;
  /// WeightChecks::values_of(shard.size) values; null for other types.
  std::uint16_t* checks = nullptr;
};

/// Elements [first, first + count) of `states`.
PartStates part_of(const PartStates& states, Elems first, Elems count);

/// Makes weights that were changed the master. A changed bf16 weight also clears the remainders of
/// the other weights with the same check value.
void follow_weights(const PartStates& states, Elems first, Elems count);

/// Notes that the present weights belong to the master.
void note_weights(const PartStates& states, Elems first, Elems count);

/// Makes the weights at the next follow_weights() the master.
void forget_master(const PartStates& states);

/// Copies the master out, with the weights where they were changed. Changes nothing.
void read_master(const PartStates& states, std::span<float> out);

/// Whether a new master also sets the weights, or leaves them: then it becomes the master of
/// weights that equal its rounded values when they are next compared.
enum class NewMaster : std::uint8_t { sets_weights, awaits_weights };

/// Copies a master in.
void write_master(const PartStates& states, std::span<const float> values, NewMaster mode);

/// Copies the master of one part to a part of the same type and size, without its weights.
void copy_master(const PartStates& from, const PartStates& to);

}  // namespace ballast::offload
