#pragma once

#include <cstddef>
#include <memory>

#include "ballast/model/compute.h"

namespace ballast::model::host {

/// Kernels for the host device; arguments as make_compute(), checked by the caller.
std::unique_ptr<Compute> make_host_compute(device::Device& device, const Architecture& model,
                                           DType type, MicroBatchShape shape);

/// The same with an explicit number of threads; needs no device before the first kernel.
std::unique_ptr<Compute> make_host_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, std::size_t threads);

/// measure_gemm_peak() of the host device.
double measure_host_gemm_peak(device::Device& device, DType type, double seconds);

}  // namespace ballast::model::host
