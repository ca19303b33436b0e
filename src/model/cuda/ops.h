#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/device/streams.h"
#include "ballast/model/compute.h"

#include "src/model/cuda/work_check.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model::cuda {

/// True for types that cuDNN's attention supports.
template <class T>
constexpr bool kFusable = kTypeOf<T> == DType::bf16;

/// State that the operations of a CUDA device share: the stream of the current pass, its checks,
/// and scratch memory.
class SharedState {
 public:
  SharedState(KernelExtents model, const KernelOptions& options);

  /// Sets the stream of the following operations.
  void use(device::Stream& stream) {
    stream_ = &device::as_cuda(stream);
    queue_ = stream_->native();
  }
  [[nodiscard]] cudaStream_t queue() const { return queue_; }
  [[nodiscard]] device::CudaStream& stream() const { return *stream_; }
  /// Checks enqueued work: always its launch, and its execution with GpuChecks::each.
  void check(cudaError_t code, std::string_view what, ShapeOfWork shape) const {
    if (code == cudaSuccess && options.checks == GpuChecks::off) return;
    check_work(code, what, shape, *stream_);
  }
  [[nodiscard]] const AttentionShape& heads() const { return extents.heads[selected]; }

  KernelExtents extents;
  KernelOptions options;
  AttentionBackend attention;  ///< own, once cuDNN turns out to be unavailable
  std::size_t selected = 0;    ///< number of the shape that AttentionOps::use_heads() has selected
  float* partials = nullptr;   ///< for sums over rows, see partial_floats()
  std::byte* products_workspace = nullptr;  ///< Products::kWorkspace bytes
  std::uint32_t* first_bad = nullptr;       ///< memory of checks of tokens
  std::byte* fused_workspace = nullptr;     ///< FusedAttention::kWorkspace bytes

 private:
  std::optional<device::WorkIsAwaited> awaited_;  ///< with GpuChecks::each
  device::CudaStream* stream_ = nullptr;
  cudaStream_t queue_ = nullptr;
};

using State = std::shared_ptr<SharedState>;

/// A class of operations that enqueue kernels on the stream of the current pass. CUDA is not used
/// before the first operation, so that plans can be made without a GPU.
class OnStream {
 protected:
  explicit OnStream(State state) : state_(std::move(state)), extents_(state_->extents) {}

  [[nodiscard]] cudaStream_t queue() const { return state_->queue(); }
  void check(cudaError_t code, std::string_view what, ShapeOfWork shape) const {
    state_->check(code, what, shape);
  }

  State state_;
  const KernelExtents& extents_;
};

// The facets of ../ops.

template <class T>
void add_row_ops(const State& state, DeviceOps<T>& to);
/// Requires elementwise operations.
template <class T>
void add_product_ops(const State& state, DeviceOps<T>& to);
template <class T>
void add_expert_ops(const State& state, DeviceOps<T>& to);
template <class T>
void add_token_ops(const State& state, DeviceOps<T>& to);
template <class T>
void add_attention_ops(const State& state, DeviceOps<T>& to);

/// Makes all operations.
template <class T>
DeviceOps<T> make_ops(const KernelExtents& extents, const KernelOptions& options);

}  // namespace ballast::model::cuda
