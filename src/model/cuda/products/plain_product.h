#pragma once

#include <cuda_runtime_api.h>

#include "src/model/compute/matrix.h"

namespace ballast::model::cuda {

/// Enqueues d = a * b (+ addend) (+ bias) on Ballast's simplest kernel: fp32 arithmetic without
/// tensor cores, asynchronous copies or a library. Arguments as for Products::multiply(), but
/// matrices may have any alignment. A sum of k terms is the sum of its parts of 16 terms in
/// ascending order, so bits depend on nothing else. The result is rounded once.
cudaError_t plain_product(cudaStream_t stream, const Extents& extents, const Matrix& a,
                          const Matrix& b, const Matrix& d, const void* addend, const void* bias);

}  // namespace ballast::model::cuda
