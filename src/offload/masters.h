#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/units.h"
#include "ballast/cpu_adam/shard.h"

namespace ballast::offload {

// The fp32 masters of 16-bit weights that another program may change. A bf16 master is the weight
// and a 16-bit remainder. Each group of kCheckedWeights bf16 weights has a check value of the
// weights that its remainders belong to, so that weights which were changed and put back keep
// their masters. An fp16 master is complete, and each weight is compared with its rounded master.
// All functions take elements [first, first + count) of a part, where `first` is a multiple of
// kCheckedWeights, and so is `count` except at the end of the part. fp32 weights have no master.

/// Weights of one check value.
inline constexpr Elems kCheckedWeights = 8;

/// Number of check values of `elements` bf16 weights.
constexpr Elems checks_of(Elems elements) {
  return (elements + kCheckedWeights - 1) / kCheckedWeights;
}

/// The arrays of a part: those of an update, and the check values of bf16 weights.
struct PartStates {
  cpu_adam::Shard shard;
  std::uint16_t* checks = nullptr;  ///< checks_of(shard.size) values; null for other types
};

/// Elements [first, first + count) of `states`.
PartStates part_of(const PartStates& states, Elems first, Elems count);

/// Makes weights that were changed the master. Returns whether there are any. In a group of bf16
/// weights, one changed weight also clears the remainders of the others.
bool follow_weights(const PartStates& states, Elems first, Elems count);

/// Notes that the present weights belong to the master.
void note_weights(const PartStates& states, Elems first, Elems count);

/// Makes the weights at the next follow_weights() the master.
void forget_master(const PartStates& states);

/// Copies the master out, with the weights where they were changed. Changes nothing.
void read_master(const PartStates& states, std::span<float> out);

/// Whether a new master also sets the weights, or leaves them: then it becomes the master of weights
/// that equal its rounded values when they are next compared.
enum class NewMaster : std::uint8_t { sets_weights, awaits_weights };

/// Copies a master in.
void write_master(const PartStates& states, std::span<const float> values, NewMaster mode);

/// Copies the master of one part to a part of the same type and size, without its weights.
void copy_master(const PartStates& from, const PartStates& to);

}  // namespace ballast::offload
