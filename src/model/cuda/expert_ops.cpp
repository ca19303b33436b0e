#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/ops.h"

namespace ballast::model::cuda {
namespace {

template <class T>
class CudaRouters final : public RouterOps<T>, OnStream {
 public:
  explicit CudaRouters(const State& state) : OnStream(state) {}

  void route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
             const std::int32_t* targets, const Routing& to, std::int32_t* starts) override {
    check(cuda::route(queue(), shape, logits, biases, targets, to, starts, state_->partials),
          "router", {shape.rows, shape.experts});
  }
  [[nodiscard]] std::span<const std::int32_t> fetch(const std::int32_t* values,
                                                    std::size_t count) override {
    fetched_.resize(count);
    check(cudaMemcpyAsync(fetched_.data(), values, count * sizeof(std::int32_t),
                          cudaMemcpyDeviceToHost, queue()),
          "copy of numbers of rows", {count});
    state_->stream().synchronize();
    return fetched_;
  }
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) override {
    check(cuda::add_router_totals(queue(), shape, routing, first, totals, state_->partials),
          "totals of a router", {shape.rows, shape.experts});
  }
  void put_choices(std::span<const double> choices, const RouterTotals& totals) override {
    // A kernel's arguments carry words of 32 bits, which it copies without reading them as numbers.
    std::vector<float> words(choices.size() * (sizeof(double) / sizeof(float)));
    std::memcpy(words.data(), choices.data(), choices.size_bytes());
    check(put_values(queue(), words, reinterpret_cast<float*>(totals.choices)), "choices of a step",
          {choices.size()});
  }
  void router_losses(const RouterShape& shape, const RouterTotals& totals,
                     double* losses) override {
    check(cuda::router_losses(queue(), shape, totals, losses), "losses of the routers",
          {shape.rows, shape.experts});
  }
  void router_gradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                       const RouterLossScales& scales, T* gradients) override {
    check(cuda::router_gradient(queue(), shape, routing, totals, scales, gradients),
          "gradient of a router", {shape.rows, shape.experts});
  }

 private:
  std::vector<std::int32_t> fetched_;
};

template <class T>
class CudaExperts final : public ExpertOps<T>, OnStream {
 public:
  explicit CudaExperts(const State& state) : OnStream(state) {}

  void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) override {
    check(cuda::gather_rows(queue(), rows, x, weights, y, padded, width), "rows of an expert",
          {rows.count, width});
  }
  void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) override {
    check(cuda::dot_rows(queue(), rows, activated, gradients, weights, weight_gradients, width),
          "gradients of the weights of an expert's rows", {rows.count, width});
  }
  void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients, const float* weights,
                float* weight_gradients, std::size_t width) override {
    check(cuda::dot_bias(queue(), rows, bias, gradients, weights, weight_gradients, width),
          "gradients of the weights of an expert's rows", {rows.count, width});
  }
  void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                     float* to) override {
    check(cuda::put_quotients(queue(), rows, values, weights, to),
          "gradients of the weights of an expert's rows", {rows.count});
  }
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) override {
    check(cuda::add_rows(queue(), rows, y, weights, sums, width), "results of an expert",
          {rows.count, width});
  }
};

}  // namespace

template <class T>
void add_expert_ops(const State& state, DeviceOps<T>& to) {
  to.routers = std::make_shared<CudaRouters<T>>(state);
  to.experts = std::make_shared<CudaExperts<T>>(state);
}

template void add_expert_ops(const State&, DeviceOps<float>&);
template void add_expert_ops(const State&, DeviceOps<Bf16>&);
template void add_expert_ops(const State&, DeviceOps<F16>&);

}  // namespace ballast::model::cuda
