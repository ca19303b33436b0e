#pragma once

#include <memory>

#include "ballast/model/compute.h"

namespace ballast::model::cuda {

/// Kernels for the CUDA device, which is not used before the first call of a kernel. Arguments as
/// make_compute(), checked by the caller. Throws Error(config) for a config value that the kernels
/// do not support, and Error(device) when cuDNN is requested but not available.
std::unique_ptr<Compute> make_cuda_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, const KernelOptions& options);

/// measure_gemm_peak() of a CUDA device. Allocates the matrices beside the device's budget and
/// frees them; uses smaller ones if little memory is free.
double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds);

}  // namespace ballast::model::cuda
