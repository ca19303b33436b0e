#include "src/model/cuda/ops.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/device/cuda/libraries.h"
#include "src/device/cuda/runtime.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/rows.h"
#include "src/model/cuda/tokens/tokens.h"

namespace ballast::model::cuda {
SharedState::SharedState(KernelExtents model, const KernelOptions& how)
    : extents(std::move(model)),
      options(how),
      attention(options.set == KernelSet::plain || extents.heads.front().cap > 0.0
                    ? AttentionBackend::own
                    : options.attention) {
  if (options.checks == GpuChecks::each) awaited_.emplace();
}

template <class T>
Ops<T>::Ops(const KernelExtents& extents, const KernelOptions& options)
    : state_(std::make_shared<SharedState>(extents, options)) {
  add_row_ops(state_, *this);
  add_product_ops(state_, *this);
  add_expert_ops(state_, *this);
  add_token_ops(state_, *this);
  add_attention_ops(state_, *this);
}

template <class T>
void Ops<T>::take_memory(Bump& bump) {
  const std::size_t tokens = state_->extents.shape.tokens();
  state_->products_workspace = bump.take<std::byte>(Products::kWorkspace, 256);
  state_->partials = bump.take<float>(partial_floats({tokens, state_->extents.widest_sum}));
  // Nothing uses it. Plans count it.
  if (state_->extents.has_layer_inputs) bump.take<std::uint32_t>(2 * tokens);
  state_->first_bad = bump.take<std::uint32_t>(1);
  if (kFusable<T>) {
    state_->fused_workspace = bump.take<std::byte>(FusedAttention::kWorkspace, 256);
  }
}

template <class T>
std::string Ops<T>::arithmetic() const {
  if (state_->options.set == KernelSet::plain) return device::gpu_facts() + ", plain kernels";
  const bool fuses = kFusable<T> && state_->attention != AttentionBackend::own &&
                     fused_attention_refusal().empty();
  return fmt::format("{}, cuBLASLt {}, attention by {}", device::gpu_facts(),
                     device::cublaslt_version(),
                     fuses ? "cuDNN " + fused_attention_version() : "Ballast");
}

template class Ops<float>;
template class Ops<Bf16>;
template class Ops<F16>;

}  // namespace ballast::model::cuda
