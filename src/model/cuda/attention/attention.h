#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/model/attention.h"

namespace ballast::model::cuda {

// softmax(Q K^T * score_scale()) V under a causal mask and the shape's mask, with the shape's soft
// cap of the scores. Steps of keys that no query of a block sees are skipped. Memory is linear in
// the sequence length: scores exist one tile at a time, and the backward pass recomputes them and
// uses the logarithm of each row's sum. Sources: Dao et al., "FlashAttention", 2022; Dao,
// "FlashAttention-2", 2023 (algorithms 1 and 2). bf16 runs on tensor cores with heads up to
// kWidestOnTensorCores; fp32, fp16 and wider heads do not. Conventions: rows.h.

/// Widths of heads that the kernels support.
inline constexpr std::size_t kWidestHead = 512;
inline constexpr std::size_t kWidestOnTensorCores = 256;

/// qkv [tokens, row()] (head_dim and value_dim multiples of 8, head_dim at most kWidestHead), out
/// [tokens, width()].
/// Writes log_sums [sequences, heads, length] (fp32, natural logarithms) for attention_backward().
template <class T>
cudaError_t attention(cudaStream_t stream, const AttentionShape& shape, const T* qkv, T* out,
                      float* log_sums);

/// out and log_sums: results of attention(). dout: gradient of out. Writes dqkv. `scratch`:
/// attention_scratch_bytes() of device memory, aligned to 16 bytes. No sum uses atomics. Both
/// functions return cudaErrorInvalidValue for unsupported widths.
template <class T>
cudaError_t attention_backward(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                               const T* out, const float* log_sums, const T* dout, T* dqkv,
                               void* scratch);
template <>
cudaError_t attention(cudaStream_t, const AttentionShape&, const Bf16*, Bf16*, float*);
template <>
cudaError_t attention_backward(cudaStream_t, const AttentionShape&, const Bf16*, const Bf16*,
                               const float*, const Bf16*, Bf16*, void*);

/// attention() and attention_backward() without tensor cores and asynchronous copies, which fp32
/// and fp16 use anyway. Rounds only inputs and results to T.
template <class T>
cudaError_t plain_attention(cudaStream_t stream, const AttentionShape& shape, const T* qkv, T* out,
                            float* log_sums);
template <class T>
cudaError_t plain_attention_backward(cudaStream_t stream, const AttentionShape& shape, const T* qkv,
                                     const T* out, const float* log_sums, const T* dout, T* dqkv,
                                     void* scratch);

/// Adds the sinks [heads] to the softmaxes after attention(), by changing `out` and `log_sums`.
template <class T>
cudaError_t add_sinks(cudaStream_t stream, const AttentionShape& shape, const T* sinks, T* out,
                      float* log_sums);
/// Adds the gradients of the sinks to `gradient`. `scratch`: as left by attention_backward().
template <class T>
cudaError_t add_sink_gradients(cudaStream_t stream, const AttentionShape& shape, const T* sinks,
                               const void* scratch, float* gradient);

std::size_t attention_scratch_bytes(const AttentionShape& shape, std::size_t element_bytes);

}  // namespace ballast::model::cuda
