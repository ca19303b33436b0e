#pragma once

#include <memory>

#include "ballast/model/compute.h"

namespace ballast::model::cuda {

/// Makes kernels for the CUDA device. The first kernel call is the first use of the device.
/// Arguments as for make_compute(), checked by the caller. Throws Error(config) for a config value
/// that the kernels do not support, and Error(device) if cuDNN is requested but not available.
std::unique_ptr<Compute> make_cuda_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, const KernelOptions& options);

/// Throws Error(config) if the kernels for `config` need more than the calling thread's current GPU
/// has.
void require_gpu_for(const ModelConfig& config);

/// Implements measure_gemm_peak() for a CUDA device. Allocates the matrices outside the device
/// budget and frees them. Uses smaller ones if little memory is free.
double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds, KernelSet set);

}  // namespace ballast::model::cuda
