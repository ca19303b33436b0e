#pragma once

#include "src/device/cuda/warpgroup.h"
#include "src/model/cuda/attention/attention_places.h"

namespace ballast::model::cuda {

/// Returns whether the GPU has products of warpgroups, and they have the head's extents. Kernels
/// with them have no soft cap.
inline bool warpgroups_fit(const AttentionShape& shape) {
  return has_kernels(shape) && shape.cap == 0.0 &&
         (shape.head_dim <= 64 ? shape.head_dim > 32 : shape.head_dim > 96) &&
         shape.head_dim <= 128 && device::has_warpgroup_products();
}
/// attention_backward() after gather_query_rows(), for shapes that fit.
cudaError_t backward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape,
                                   const Bf16* qkv, const QueryRow* rows, const Bf16* dout,
                                   Bf16* dqkv);
/// attention() for shapes that fit.
cudaError_t forward_by_warpgroups(cudaStream_t stream, const AttentionShape& shape, const Bf16* qkv,
                                  Bf16* out, float* log_sums);

}  // namespace ballast::model::cuda
