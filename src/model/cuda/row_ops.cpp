#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ballast/device/streams.h"

#include "src/device/cuda/runtime.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/ops.h"
#include "src/model/cuda/rows/rows.h"
#include "src/model/cuda/tokens/tokens.h"

namespace ballast::model::cuda {
namespace {

template <class T>
class CudaNorms final : public NormOps<T>, OnStream {
 public:
  explicit CudaNorms(const State& state) : OnStream(state) {}

  void norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows,
            const T* residual) override {
    check(cuda::norm(queue(), x, weights.weight, weights.bias, weights.epsilon_or(extents_.epsilon),
                     residual, y, {rows, extents_.hidden}, {}, weights.offset, weights.centred),
          "norm", {rows, extents_.hidden});
  }
  void norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual, T* dx,
                     std::size_t rows) override {
    check(cuda::norm_backward(queue(), x, weights.weight, dy, weights.epsilon_or(extents_.epsilon),
                              residual, dx, weights.weight_gradient, weights.bias_gradient,
                              state_->partials, {rows, extents_.hidden}, {}, weights.offset,
                              weights.centred || weights.bias != nullptr),
          "gradient of norm", {rows, extents_.hidden});
  }
  void norm_groups(const Norm<T>& weights, const Groups& groups, const T* x, std::size_t x_step,
                   T* y, std::size_t y_step) override {
    const float epsilon = weights.epsilon_or(extents_.epsilon);
    check(cuda::norm<T>(queue(), x, weights.weight, nullptr, epsilon, nullptr, y,
                        {groups.rows * groups.count, groups.width}, {groups.count, x_step, y_step},
                        weights.offset),
          "norm of queries or keys", {groups.rows, groups.count, groups.width});
  }
  void norm_groups_backward(const Norm<T>& weights, const Groups& groups, const T* x,
                            std::size_t x_step, T* dy, std::size_t dy_step) override {
    const float epsilon = weights.epsilon_or(extents_.epsilon);
    check(cuda::norm_backward<T>(queue(), x, weights.weight, dy, epsilon, nullptr, dy,
                                 weights.weight_gradient, nullptr, state_->partials,
                                 {groups.rows * groups.count, groups.width},
                                 {groups.count, x_step, dy_step}, weights.offset),
          "gradient of a norm of queries or keys", {groups.rows, groups.count, groups.width});
  }
};

template <class T>
class CudaElementwise final : public ElementwiseOps<T>, OnStream {
 public:
  explicit CudaElementwise(const State& state) : OnStream(state) {}

  void activate(Activation f, const T* x, T* y, std::size_t size) override {
    check(cuda::activate(queue(), f, x, y, size), "activation", {size});
  }
  void activate_backward(Activation f, const T* x, T* d, float* bias_gradient, std::size_t rows,
                         std::size_t width) override {
    check(cuda::activate_backward(queue(), f, x, d, rows * width), "gradient of an activation",
          {rows, width});
    if (bias_gradient != nullptr) add_column_sums(d, width, bias_gradient, rows, width);
  }
  void glu(const Gating& how, const GateUp<T>& in, T* y) override {
    check(cuda::glu(queue(), how, in.gate, in.up, in.step, y, {in.rows, in.width}), "gate",
          {in.rows, in.width});
  }
  void glu_backward(const Gating& how, const GateUp<T>& in, const T* dy) override {
    check(cuda::glu_backward(queue(), how, in.gate, in.up, in.step, dy, {in.rows, in.width}),
          "gradient of a gate", {in.rows, in.width});
  }
  void add_column_sums(const T* x, std::size_t step, float* gradient, std::size_t rows,
                       std::size_t width) override {
    check(cuda::add_column_sums(queue(), x, step, gradient, state_->partials, {rows, width}),
          "gradient of a bias", {rows, width});
  }
  void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) override {
    if (bias == nullptr) return;
    check(cuda::add_bias(queue(), bias, y, rows, width), "bias of an expert", {rows, width});
  }
  void scale(T* x, float factor, std::size_t size) override {
    check(cuda::scale(queue(), x, factor, size), "scale of an adapter", {size});
  }
  void scale_by(const T* addends, std::size_t count, T* x, std::size_t size) override {
    check(cuda::scale_by(queue(), addends, count, x, size), "scale of a layer", {size});
  }
  void drop(const DropoutMask& mask, const T* x, T* y, std::size_t size, bool add_to_y) override {
    check(cuda::drop(queue(), mask, x, y, size, add_to_y), "dropout", {size});
  }
  void put(std::span<const float> values, float* to) override {
    check(cuda::put_values(queue(), values, to), "copy of values", {values.size()});
  }
  void add_sum(const float* values, std::size_t count, float* sum) override {
    check(add_partials(queue(), {values, count, 1}, sum, nullptr), "sum of an expert's rows",
          {count});
  }
  void zero(float* values, std::size_t size) override {
    if (size == 0) return;
    check(cudaMemsetAsync(values, 0, size * sizeof(float), queue()), "clearing gradients", {size});
  }
  void widen(const T* x, float* y, std::size_t size) override {
    check(cuda::widen(queue(), x, y, size), "conversion to fp32", {size});
  }
  void accumulate(const float* part, float* sums, std::size_t size) override {
    check(cuda::accumulate(queue(), part, sums, size), "sum of the tiles", {size});
  }
  void copy_bytes(const std::byte* from, std::byte* to, std::size_t size) override {
    check(cuda::copy_bytes(queue(), from, to, size), "copying weights", {size});
  }
};

template <class T>
class CudaPacking final : public PackingOps<T>, OnStream {
 public:
  explicit CudaPacking(const State& state) : OnStream(state) {}

  void forget_sum_rows(std::uint32_t* sum_row_of, std::size_t rows) override {
    static_assert(kNoSumRow == 0xFFFFFFFFU);
    check(cudaMemsetAsync(sum_row_of, 0xFF, rows * sizeof(std::uint32_t), queue()),
          "clearing the sum rows of tokens", {rows});
  }
  void find_sum_rows(const Ids& ids, std::size_t first, std::size_t rows,
                     std::uint32_t* sum_row_of) override {
    check(cuda::find_sum_rows(queue(), ids, extents_.shape.tokens(), {first, rows, sum_row_of}),
          "finding the sum rows of tokens", {extents_.shape.tokens()});
  }
  void pack(const UnpackedGradient& from, T* packed, std::size_t size, GradientStats* partial,
            GradientStats* stats) override {
    check(cuda::pack_gradient(queue(), from, packed, size, partial, stats), "packing a gradient",
          {size});
  }
  void measure(device::Stream& stream, const T* packed, std::size_t size, GradientStats* partial,
               GradientStats* stats) override {
    device::check_cuda(
        cuda::measure_gradient(device::as_cuda(stream).native(), packed, size, partial, stats),
        "statistics of a gradient");
  }
  void encode(device::Stream& stream, const T* weights, std::size_t blocks, std::int8_t* codes,
              float* scales) override {
    device::check_cuda(
        cuda::quantize_weights(device::as_cuda(stream).native(), weights, blocks, codes, scales),
        "encoding weights");
  }
  void decode(device::Stream& stream, const std::int8_t* codes, const float* scales,
              std::size_t blocks, T* weights) override {
    device::check_cuda(
        cuda::dequantize_weights(device::as_cuda(stream).native(), codes, scales, blocks, weights),
        "decoding weights");
  }
  void dequantize_base(const QuantizedMatrix& matrix, T* out) override {
    check(cuda::dequantize_base(queue(), matrix, out), "decoding a quantised base",
          {matrix.arrays.elements});
  }
  void zero(device::Stream& stream, float* values, std::size_t size) override {
    if (size == 0) return;
    device::check_cuda(
        cudaMemsetAsync(values, 0, size * sizeof(float), device::as_cuda(stream).native()),
        "clearing gradients");
  }
};

}  // namespace

template <class T>
void add_row_ops(const State& state, DeviceOps<T>& to) {
  to.norms = std::make_shared<CudaNorms<T>>(state);
  to.elementwise = std::make_shared<CudaElementwise<T>>(state);
  to.packing = std::make_shared<CudaPacking<T>>(state);
}

template void add_row_ops(const State&, DeviceOps<float>&);
template void add_row_ops(const State&, DeviceOps<Bf16>&);
template void add_row_ops(const State&, DeviceOps<F16>&);

}  // namespace ballast::model::cuda
