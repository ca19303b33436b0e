#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"

namespace ballast::model::cuda {

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
