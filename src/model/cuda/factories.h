#pragma once

#include <memory>

#include "ballast/model/compute.h"

namespace ballast::model::cuda {

/// Kernels for the CUDA device, which is needed for the first of them only; arguments as
/// make_compute(), checked by the caller. Throws Error(config) naming a key whose number these
/// kernels cannot do, and Error(device) where cuDNN is asked for and not there.
std::unique_ptr<Compute> make_cuda_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, AttentionBackend backend);

/// measure_gemm_peak() of the CUDA device.
double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds);

}  // namespace ballast::model::cuda
