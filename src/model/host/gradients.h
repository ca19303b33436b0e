#pragma once

#include <cstddef>

#include "ballast/model/compute.h"

#include "src/model/host/kernels.h"

namespace ballast::model::host {

// Compute's calls of the same names, spread over the team. `partial`: scratch memory, a
// GradientStats per kStatsChunk values.

/// `tied` [tied_size]: added to the first values.
template <class T>
GradientStats pack_gradient(const GradientKernels<T>& kernels, const float* gradient,
                            const float* tied, std::size_t tied_size, T* packed, std::size_t size,
                            GradientStats* partial);
template <class T>
GradientStats measure_gradient(const GradientKernels<T>& kernels, const T* packed, std::size_t size,
                               GradientStats* partial);

}  // namespace ballast::model::host
