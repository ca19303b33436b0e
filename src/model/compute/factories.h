#pragma once

#include <cstddef>
#include <memory>

#include "ballast/model/compute.h"

#include "src/model/ops/device_ops.h"

namespace ballast::model {

/// Makes kernels on top of a device's operations, which must be for kernel_extents(model, shape).
template <class T>
std::unique_ptr<Compute> make_device_compute(const Architecture& model, MicroBatchShape shape,
                                             DeviceOps<T> ops);

}  // namespace ballast::model

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
