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
void read_values(cpu_adam::Optimizer optimizer, const cpu_adam::Shard& shard,
                 const StateValues& values);
/// Copies states of a part in. A master also sets the weights. See cpu_adam::write_moments().
void write_values(cpu_adam::Optimizer optimizer, const cpu_adam::Shard& shard,
                  const StateValues& values);

/// The overloads below do this for a whole parameter. Throw like OffloadedOptimizer::begin().
void read_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                 const StateValues& values);
void write_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                  const StateValues& values);

/// Copies the states of one parameter to another one with the same number of elements and the same
/// optimizer, part by part. `weights`: weights of both, if they have the same type, to copy the
/// master too; or null. The objects must differ. Throws like OffloadedOptimizer::begin().
void copy_states(OffloadedOptimizer& from, std::size_t parameter, OffloadedOptimizer& to,
                 std::size_t target, void* weights);

}  // namespace ballast::offload
