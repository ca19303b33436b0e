#pragma once

#include <memory>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"

namespace ballast::model::cuda {

/// The forward pass of attention() in bf16 by an engine of cuDNN. It also writes the log-sums that
/// Ballast's backward pass needs. The backward pass of cuDNN is not used, because it adds the
/// gradients of queries in memory in any order (in the code of 9.19's engine for an H100:
/// UTMAREDG.ADD) without being marked with CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC. The variant of
/// its graph with a fixed order needs workspace for every pair of positions of every head (1 GiB
/// for 32 heads of 4096 tokens). The code of the forward engines has no such sums.
class FusedAttention {
 public:
  /// Bytes of device memory that forward() needs at most. cuDNN 9.19 needs 256 on an H100 or H200
  /// for all shapes, and none on an A100 or L4.
  static constexpr Bytes kWorkspace = 1 * kMiB;

  /// Plans the computation for the current device. This takes up to a few seconds, because engines
  /// are compiled when they are planned. Throws Error(device) with the reason in one line if cuDNN
  /// cannot be used.
  explicit FusedAttention(const AttentionShape& shape);
  ~FusedAttention();
  FusedAttention(const FusedAttention&) = delete;
  FusedAttention& operator=(const FusedAttention&) = delete;

  /// Arguments as those of attention(), aligned to 16 bytes. Equal calls have equal bits on GPUs of
  /// one model. `workspace`: kWorkspace bytes, aligned to 256, not used after the call. The current
  /// device must be that of the constructor. Throws Error(device).
  void forward(cudaStream_t stream, const Bf16* qkv, Bf16* out, float* log_sums, void* workspace);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// "" if cuDNN can be loaded, otherwise the reason in one line.
std::string_view fused_attention_refusal();
/// The file cuDNN was loaded from, or "".
std::string_view fused_attention_file();

}  // namespace ballast::model::cuda
