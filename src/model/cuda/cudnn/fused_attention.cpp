#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "ballast/core/error.h"

#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/cudnn/cudnn.h"

namespace ballast::model::cuda {

namespace {

using Tensor = OperationGraph::Tensor;

/// Extents in cuDNN's integer type.
struct Counts {
  explicit Counts(const AttentionShape& shape)
      : sequences(static_cast<std::int64_t>(shape.sequences)),
        length(static_cast<std::int64_t>(shape.length)),
        heads(static_cast<std::int64_t>(shape.heads)),
        kv_heads(static_cast<std::int64_t>(shape.kv_heads)),
        head_dim(static_cast<std::int64_t>(shape.head_dim)),
        row(static_cast<std::int64_t>(shape.row())),
        hidden(static_cast<std::int64_t>(shape.width())) {}

  std::int64_t sequences;
  std::int64_t length;
  std::int64_t heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
  std::int64_t row;
  std::int64_t hidden;

  /// Shape [sequences, heads, length, head_dim] in a matrix with one row per token.
  [[nodiscard]] TensorShape tokens(std::int64_t of_heads, std::int64_t step) const {
    return {{sequences, of_heads, length, head_dim}, {length * step, head_dim, step, 1}};
  }
  /// Shape [sequences, heads, head_dim, length] in the same matrix.
  [[nodiscard]] TensorShape transposed_tokens(std::int64_t of_heads, std::int64_t step) const {
    return {{sequences, of_heads, head_dim, length}, {length * step, head_dim, 1, step}};
  }
  [[nodiscard]] TensorShape scores() const {
    return {{sequences, heads, length, length},
            {heads * length * length, length * length, length, 1}};
  }
  /// Shape with one number per query.
  [[nodiscard]] TensorShape queries() const {
    return {{sequences, heads, length, 1}, {heads * length, length, 1, 1}};
  }
};

class Builder {
 public:
  Builder(const CudnnCalls& calls, const AttentionShape& shape) : counts_(shape), graph_(calls) {}

  OperationGraph build(cudnnHandle_t handle) {
    const Tensor probabilities = softmax(hide_later_keys(scaled_scores()));
    const Tensor values =
        memory(AttentionTensor::values, counts_.tokens(counts_.kv_heads, counts_.row));
    graph_.multiply(probabilities, values,
                    memory(AttentionTensor::out, counts_.tokens(counts_.heads, counts_.hidden)));
    graph_.finish(handle);
    return std::move(graph_);
  }

 private:
  Tensor memory(AttentionTensor which, const TensorShape& shape,
                cudnnDataType_t type = CUDNN_DATA_BFLOAT16) {
    return graph_.memory(static_cast<std::int64_t>(which), type, shape);
  }
  Tensor number(AttentionTensor which) { return graph_.number(static_cast<std::int64_t>(which)); }
  Tensor scores(cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return graph_.between(type, counts_.scores());
  }
  Tensor of_queries() { return graph_.between(CUDNN_DATA_FLOAT, counts_.queries()); }

  Tensor scaled_scores() {
    const Tensor queries =
        memory(AttentionTensor::queries, counts_.tokens(counts_.heads, counts_.row));
    const Tensor keys =
        memory(AttentionTensor::keys, counts_.transposed_tokens(counts_.kv_heads, counts_.row));
    const Tensor products = scores();
    graph_.multiply(queries, keys, products);
    const Tensor scaled = scores();
    graph_.pointwise(CUDNN_POINTWISE_MUL, products, number(AttentionTensor::scale), scaled);
    return scaled;
  }

  /// Masks the keys after each query's position.
  Tensor hide_later_keys(Tensor all) {
    const Tensor query = scores(CUDNN_DATA_INT32);
    const Tensor key = scores(CUDNN_DATA_INT32);
    graph_.index(2, all, query);
    graph_.index(3, all, key);
    const Tensor seen = scores(CUDNN_DATA_BOOLEAN);
    graph_.compare(CUDNN_POINTWISE_CMP_GE, query, key, seen);
    const Tensor masked = scores();
    graph_.select(seen, all, number(AttentionTensor::hidden), masked);
    return masked;
  }

  /// Softmax, with results in bf16. Writes the logarithm of each row's sum, which includes the
  /// maximum, to memory.
  Tensor softmax(Tensor masked) {
    const Tensor greatest = of_queries();
    graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, greatest);
    const Tensor differences = scores();
    graph_.pointwise(CUDNN_POINTWISE_SUB, masked, greatest, differences);
    const Tensor powers = scores();
    graph_.pointwise(CUDNN_POINTWISE_EXP, differences, powers);
    const Tensor sums = of_queries();
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, powers, sums);
    const Tensor logarithms = of_queries();
    graph_.pointwise(CUDNN_POINTWISE_LOG, sums, logarithms);
    graph_.pointwise(CUDNN_POINTWISE_ADD, greatest, logarithms,
                     memory(AttentionTensor::log_sums, counts_.queries(), CUDNN_DATA_FLOAT));
    const Tensor probabilities = scores(CUDNN_DATA_BFLOAT16);
    graph_.pointwise(CUDNN_POINTWISE_DIV, powers, sums, probabilities);
    return probabilities;
  }

  Counts counts_;
  OperationGraph graph_;
};

}  // namespace

OperationGraph attention_graph(const CudnnCalls& calls, const AttentionShape& shape,
                               cudnnHandle_t handle) {
  return Builder(calls, shape).build(handle);
}

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
