#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ballast/model/quantization.h"
#include "ballast/model/quantized_values.h"

namespace ballast::model::cuda {

/// out = all elements of `matrix` (device memory, aligned to 64 bytes as `out` is), with the bits
/// of the host device (host/base_codes.h) but for payloads of NaNs.
template <class T>
cudaError_t decode_base(cudaStream_t stream, const CodedMatrix& matrix, T* out);

/// Copies `size` bytes within device memory, a multiple of 16.
cudaError_t copy_bytes(cudaStream_t stream, const std::byte* from, std::byte* to, std::size_t size);

}  // namespace ballast::model::cuda
