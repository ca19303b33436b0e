#include "src/model/cuda/cudnn/fused_attention.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "ballast/core/error.h"

#include "src/model/cuda/cudnn/attention_graph.h"
#include "src/model/cuda/cudnn/cudnn.h"
#include "src/model/cuda/cudnn/operation_graph.h"

namespace ballast::model::cuda {
namespace {

/// Deletes a cuDNN handle.
struct EndHandle {
  const Cudnn* library = nullptr;
  void operator()(cudnnContext* handle) const noexcept {
    static_cast<void>(library->destroy(handle));
  }
};
using Handle = std::unique_ptr<cudnnContext, EndHandle>;

Handle make_handle(const CudnnCalls& calls) {
  cudnnHandle_t made = nullptr;
  calls.check(calls.library().create(&made), "creating a handle");
  return {made, {&calls.library()}};
}

}  // namespace

struct FusedAttention::Plan {
  explicit Plan(const AttentionShape& attention)
      : shape(attention),
        calls(cudnn()),
        handle(make_handle(calls)),
        graph(attention_graph(calls, shape, handle.get())),
        engine(plan_graph(calls, handle.get(), graph.descriptor(), kWorkspace)) {}

  AttentionShape shape;
  CudnnCalls calls;
  Handle handle;
  OperationGraph graph;
  EnginePlan engine;
};

FusedAttention::FusedAttention(const AttentionShape& shape)
    : plan_(std::make_unique<Plan>(shape)) {}
FusedAttention::~FusedAttention() = default;

void FusedAttention::forward(cudaStream_t stream, const Bf16* qkv, Bf16* out, float* log_sums,
                             void* workspace) {
  const CudnnCalls& calls = plan_->calls;
  const AttentionShape& shape = plan_->shape;
  float scale = shape.score_scale();
  float hidden = -std::numeric_limits<float>::infinity();
  Bf16* const queries = const_cast<Bf16*>(qkv);
  // cuDNN reads the numbers while it enqueues the execution, so they may be on this stack.
  using Which = AttentionTensor;
  const auto id = [](Which which) { return static_cast<std::int64_t>(which); };
  const std::array ids = {id(Which::queries),  id(Which::keys),  id(Which::values), id(Which::out),
                          id(Which::log_sums), id(Which::scale), id(Which::hidden)};
  const std::array<void*, ids.size()> places = {queries,
                                                queries + shape.width(),
                                                queries + shape.width() + shape.kv_width(),
                                                out,
                                                log_sums,
                                                &scale,
                                                &hidden};
  const Descriptor pack = calls.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  calls.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, std::span<const std::int64_t>(ids));
  calls.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, std::span<void* const>(places));
  calls.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, workspace);
  calls.finish(pack, "finalizing the tensors of attention");
  calls.check(calls.library().set_stream(plan_->handle.get(), stream), "setting the stream");
  calls.check(calls.library().execute(plan_->handle.get(), plan_->engine.plan.get(), pack.get()),
              "attention");
}

std::string_view fused_attention_refusal() {
  return cudnn_refusal();
}

std::string_view fused_attention_file() {
  return cudnn_file();
}

std::string fused_attention_version() {
  return cudnn_refusal().empty() ? device::library_version_text(cudnn().version()) : "";
}

}  // namespace ballast::model::cuda
