#pragma once

#include <cstddef>
#include <memory>

#include "ballast/model/compute.h"

#include "src/model/compute/mlp_rule.h"

namespace ballast::model::host {

inline constexpr MlpRule kMlpRule = {.bytes = 128 * kMiB, .joins_gate_and_up = false};

/// Makes kernels for the host device. Arguments as for make_compute(), checked by the caller.
std::unique_ptr<Compute> make_host_compute(device::Device& device, const Architecture& model,
                                           DType type, MicroBatchShape shape);

/// Overload with an explicit number of threads. Needs no device before the first kernel.
std::unique_ptr<Compute> make_host_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, std::size_t threads,
                                           const MlpRule& mlp_rule = kMlpRule);

/// Implements measure_gemm_peak() for the host device.
double measure_host_gemm_peak(device::Device& device, DType type, double seconds);

}  // namespace ballast::model::host
