#pragma once

#include <memory>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"

namespace ballast::model::cuda {

/// The forward pass of attention() in bf16 by an engine of cuDNN, which writes the log-sums that
/// our own backward pass needs. Why not the backward pass too: cuDNN's adds up the gradients of
/// queries in memory, in whatever order they come (in the code of 9.19's engine for an H100:
/// UTMAREDG.ADD), and is not marked for that with CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC; the form
/// of its graph that is computed in a fixed order keeps a number for every pair of places of every
/// head in its workspace (1 GiB for 32 heads of 4096 tokens). The code of the forward engines has
/// no such sums.
class FusedAttention {
 public:
  /// Bytes of device memory that forward() takes. cuDNN 9.19 needs 256 on an H100 or H200, for all
  /// shapes, and none on an A100 or L4.
  static constexpr Bytes kWorkspace = 1 * kMiB;

  /// Plans it for the current device, which takes up to a few seconds: engines are compiled when
  /// they are planned. Throws Error(device), one line: why cuDNN will not do.
  explicit FusedAttention(const AttentionShape& shape);
  ~FusedAttention();
  FusedAttention(const FusedAttention&) = delete;
  FusedAttention& operator=(const FusedAttention&) = delete;

  /// Arguments as those of attention(), aligned to 16 bytes; equal calls give equal bits on GPUs of
  /// one model. `workspace`: kWorkspace bytes, aligned to 256, of which nothing is kept. From a
  /// thread whose current device is that of the constructor. Throws Error(device).
  void forward(cudaStream_t stream, const Bf16* qkv, Bf16* out, float* log_sums, void* workspace);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// Empty when cuDNN can be loaded; else the reason, one line.
std::string_view fused_attention_refusal();

}  // namespace ballast::model::cuda
