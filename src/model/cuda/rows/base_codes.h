#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ballast/model/quantization.h"
#include "ballast/model/quantized_values.h"

namespace ballast::model::cuda {

/// Dequantises all elements of `matrix` (device memory, aligned to 64 bytes like `out`). The bits
/// equal the host device's (host/base_codes.h), except payloads of NaN.
template <class T>
cudaError_t dequantize_base(cudaStream_t stream, const QuantizedMatrix& matrix, T* out);

/// Copies `size` bytes, a multiple of 16, within device memory.
cudaError_t copy_bytes(cudaStream_t stream, const std::byte* from, std::byte* to, std::size_t size);

}  // namespace ballast::model::cuda
