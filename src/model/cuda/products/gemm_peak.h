#pragma once

#include "ballast/core/dtype.h"
#include "ballast/device/device.h"

namespace ballast::model::cuda {

/// measure_gemm_peak() of a CUDA device. Matrices are in memory of their own, beside the device's
/// budget, and given back; where little is free, they are smaller.
double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds);

}  // namespace ballast::model::cuda
