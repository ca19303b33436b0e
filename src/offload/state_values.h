#pragma once

#include <span>

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

}  // namespace ballast::offload
