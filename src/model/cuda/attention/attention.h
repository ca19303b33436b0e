#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
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

/// The forward pass of attention() in bf16 by a cuDNN engine. It also writes the log-sums that
/// Ballast's backward pass needs. cuDNN's backward pass is not used, because it adds the gradients
/// of queries in memory in any order (UTMAREDG.ADD in the code of 9.19's engine for an H100)
/// although CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC does not mark it. A variant of its graph has a
/// fixed order, but needs workspace for each pair of positions of every head (1 GiB for 32 heads of
/// 4096 tokens). The code of the forward engines has no such sums.
class FusedAttention {
 public:
  /// Maximum device memory for forward(), in bytes. cuDNN 9.19 needs 256 on an H100 or H200 for all
  /// shapes, and none on an A100 or L4.
  static constexpr Bytes kWorkspace = 1 * kMiB;

  /// Plans the computation for the current device. Takes up to a few seconds, because planning
  /// compiles engines. Throws Error(device) with the reason in one line if cuDNN cannot be used.
  explicit FusedAttention(const AttentionShape& shape);
  ~FusedAttention();
  FusedAttention(const FusedAttention&) = delete;
  FusedAttention& operator=(const FusedAttention&) = delete;

  /// Arguments as for attention(), aligned to 16 bytes. Equal calls give equal bits on GPUs of one
  /// model. `workspace`: kWorkspace bytes, aligned to 256, not used after the call. The current
  /// device must be the constructor's. Throws Error(device).
  void forward(cudaStream_t stream, const Bf16* qkv, Bf16* out, float* log_sums, void* workspace);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// Returns why cuDNN cannot be loaded, in one line; "" if it can.
std::string_view fused_attention_refusal();
/// Returns the path of the file from which cuDNN was loaded, or "".
std::string_view fused_attention_file();
/// Returns the version of cuDNN, "9.19.0"; "" if it cannot be loaded.
std::string fused_attention_version();

}  // namespace ballast::model::cuda
