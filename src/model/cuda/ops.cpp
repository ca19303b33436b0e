#include "src/model/cuda/ops.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/units.h"

#include "src/device/cuda/libraries.h"
#include "src/device/cuda/runtime.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/products/products.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

class CudaQueue final : public WorkQueue {
 public:
  /// `fusable`: see kFusable.
  CudaQueue(State state, bool fusable) : state_(std::move(state)), fusable_(fusable) {}

  void run(device::Stream& stream, std::function<void()> work) override {
    state_->use(stream);
    work();
  }
  /// Describes the calling thread's current GPU.
  [[nodiscard]] std::string arithmetic() const override {
    if (state_->options.set == KernelSet::plain) return device::gpu_facts() + ", plain kernels";
    const bool fuses =
        fusable_ && state_->attention != AttentionBackend::own && fused_attention_refusal().empty();
    return fmt::format("{}, cuBLASLt {}, attention by {}", device::gpu_facts(),
                       device::cublaslt_version(),
                       fuses ? "cuDNN " + fused_attention_version() : "Ballast");
  }
  void take_memory(Bump& bump) override {
    const KernelExtents& extents = state_->extents;
    const std::size_t tokens = extents.shape.tokens();
    state_->products_workspace = bump.take<std::byte>(Products::kWorkspace, 256);
    state_->partials = bump.take<float>(partial_floats({tokens, extents.widest_sum}));
    // Nothing uses it, but plans count it.
    if (extents.has_layer_inputs) bump.take<std::uint32_t>(2 * tokens);
    state_->first_bad = bump.take<std::uint32_t>(1);
    if (fusable_) state_->fused_workspace = bump.take<std::byte>(FusedAttention::kWorkspace, 256);
  }

 private:
  State state_;
  bool fusable_;
};

}  // namespace

SharedState::SharedState(KernelExtents model, const KernelOptions& how)
    : extents(std::move(model)),
      options(how),
      attention(options.set == KernelSet::plain || extents.heads.front().cap > 0.0
                    ? AttentionBackend::own
                    : options.attention) {
  if (options.checks == GpuChecks::each) awaited_.emplace();
}

template <class T>
DeviceOps<T> make_ops(const KernelExtents& extents, const KernelOptions& options) {
  const auto state = std::make_shared<SharedState>(extents, options);
  DeviceOps<T> ops;
  add_row_ops(state, ops);
  add_product_ops(state, ops);
  add_expert_ops(state, ops);
  add_token_ops(state, ops);
  add_attention_ops(state, ops);
  ops.queue = std::make_shared<CudaQueue>(state, kFusable<T>);
  ops.traits = {.mlp = {.bytes = 1 * kGiB, .joins_gate_and_up = true},
                .logit_bytes = 512 * kMiB,
                // See in_whole_eights().
                .sums_in_parts = [](std::size_t extent) {
                  return sizeof(T) == 2 && whole_eights(extent) < extent;
                }};
  return ops;
}

template DeviceOps<float> make_ops(const KernelExtents&, const KernelOptions&);
template DeviceOps<Bf16> make_ops(const KernelExtents&, const KernelOptions&);
template DeviceOps<F16> make_ops(const KernelExtents&, const KernelOptions&);

}  // namespace ballast::model::cuda
