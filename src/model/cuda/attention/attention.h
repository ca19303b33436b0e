#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/model/attention.h"

namespace ballast::model::cuda {

// softmax(Q K^T * score_scale()) V under a causal mask and that of the shape: steps of keys that
// no query of a block sees are skipped. Memory is linear in the sequence length: scores exist one
// tile at a time, and the backward pass recomputes them from the logarithm of each row's sum.
// Sources: Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023 (algorithms 1 and 2).
// bf16 runs on tensor cores, fp32 and fp16 do not. Conventions: rows.h.

/// qkv [tokens, row()] (head_dim a multiple of 8, at most 256), out [tokens, width()]; log_sums
/// [sequences, heads, length], fp32, natural logarithms, written for attention_backward().
template <class T>
cudaError_t attention(cudaStream_t stream, const AttentionShape& shape, const T* qkv, T* out,
                      float* log_sums);

/// out and log_sums are the results of attention(), dout is the gradient of out, dqkv is written.
/// `scratch`: attention_scratch_bytes() of device memory, aligned to 16 bytes. No sum uses atomics.
/// Both functions return cudaErrorInvalidValue for a head_dim that is not supported.
template <class T>
cudaError_t attention_backward(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                               const T* out, const float* log_sums, const T* dout, T* dqkv,
                               void* scratch);
template <>
cudaError_t attention(cudaStream_t, const AttentionShape&, const Bf16*, Bf16*, float*);
template <>
cudaError_t attention_backward(cudaStream_t, const AttentionShape&, const Bf16*, const Bf16*,
                               const float*, const Bf16*, Bf16*, void*);

/// Makes the sinks [heads] keys of all queries after attention(): changes `out` and `log_sums` to
/// those of softmaxes that include them.
template <class T>
cudaError_t add_sinks(cudaStream_t stream, const AttentionShape& shape, const T* sinks, T* out,
                      float* log_sums);
/// Adds the gradients of the sinks to `gradient`; `scratch`: as attention_backward() has left it.
template <class T>
cudaError_t add_sink_gradients(cudaStream_t stream, const AttentionShape& shape, const T* sinks,
                               const void* scratch, float* gradient);

std::size_t attention_scratch_bytes(const AttentionShape& shape, std::size_t element_bytes);

}  // namespace ballast::model::cuda
