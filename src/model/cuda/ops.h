#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "ballast/device/streams.h"
#include "ballast/model/compute.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/products/products.h"
#include "src/model/cuda/rows/rows.h"
#include "src/model/cuda/shared_state.h"
#include "src/model/cuda/tokens/tokens.h"
#include "src/model/cuda/work_check.h"

namespace ballast::model::cuda {

/// The operations of the CUDA device (../layer.h), documented at the host device's (../host/ops.h).
/// Each enqueues kernels on the stream of run(). CUDA is not used before the first operation, so
/// that plans can be made without a GPU.
template <class T>
class Ops : public DeviceOps<T> {
 public:
  static constexpr Bytes kLogitBytes = 512 * kMiB;
  /// See in_whole_eights().
  static constexpr bool sums_in_parts(std::size_t extent) {
    return sizeof(T) == 2 && whole_eights(extent) < extent;
  }

  Ops(const KernelExtents& extents, const KernelOptions& options);

  [[nodiscard]] static constexpr MlpRule mlp_rule() {
    return {.bytes = 1 * kGiB, .joins_gate_and_up = true};
  }

  /// Calls `work`, whose operations are enqueued on `stream`.
  template <class Work>
  void run(device::Stream& stream, const Work& work) {
    state_->use(stream);
    work();
  }

  void take_memory(Bump& bump);

  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows);
  void linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y, std::size_t rows);
  void linear_part(const Linear<T>& layer, const T* x, float* part, std::size_t rows) {
    const Product p = forward_product(layer, x, part, layer.out, rows);
    multiply(p.extents, p.a, p.b, p.c);
    this->elementwise->add_bias(layer.bias, part, rows, layer.out);
  }
  template <class D>
  void linear_input(const Linear<T>& layer, const T* dy, std::size_t dy_row, D* dx,
                    std::size_t rows, bool add_to_dx = false) {
    const Product p = input_product(layer, dy, dy_row, dx, rows);
    multiply(p.extents, p.a, p.b, p.c, add_to_dx);
  }
  void linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                     std::size_t rows);
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c = false);

  /// A later wait for the stream throws Error(data) for a token that the host device would refuse.
  void check_tokens(const std::int32_t* tokens, std::int32_t least);
  void embed(const Embedding<const T>& tables, const Ids& ids, T* out) const;
  [[nodiscard]] std::size_t embedding_scratch_bytes() const;
  void embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                      std::byte* scratch) const;
  void cap_logits(const LogitTile& tile) const;
  void sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                  RowSum<float>* sums) const;
  void merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) const;
  void logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                       const float* weights, const RowSum<float>* sums) const;
  void row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                  double* losses) const;
  void sum_losses(const double* losses, std::size_t count, std::size_t parts, double* sums) const;
  void dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) const;

  /// See Compute::arithmetic(). Describes the calling thread's current GPU.
  [[nodiscard]] std::string arithmetic() const;
  void route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
             const std::int32_t* targets, const Routing& to, std::int32_t* starts) const;
  [[nodiscard]] std::span<const std::int32_t> fetch(const std::int32_t* values, std::size_t count);
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) const;
  void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses) const;
  void router_gradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                       const RouterLossScales& scales, T* gradients) const;
  void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) const;
  void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) const;
  void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients, const float* weights,
                float* weight_gradients, std::size_t width) const;
  void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                     float* to) const;
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) const;

  void compute_dora_scales(const AdaptedRows<T>& rows, float* scales, float* inverse_norms) const;
  void scale_columns(const ScaledColumns<T>& columns) const;
  void add_column_products(const ColumnProducts<T>& columns, float* gradient) const;

  // Collectives call these functions, too, on threads and streams that differ from those of run().

 private:
  [[nodiscard]] EmbeddingExtents embedding_extents() const {
    return {shape_.tokens(), shape_.whole_length(), hidden_};
  }
  [[nodiscard]] cudaStream_t queue() const { return state_->queue(); }
  void check(cudaError_t code, std::string_view what, ShapeOfWork shape) const {
    state_->check(code, what, shape);
  }
  void multiply_with(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                     const Extras& extras);
  [[nodiscard]] Products& products();

  State state_;
  MicroBatchShape shape_;
  std::size_t hidden_;
  std::size_t vocabulary_;
  Rows widest_;  ///< maximum over all sums over rows, including routers and experts
  std::optional<Products> products_;
  std::byte* products_workspace_ = nullptr;
  TokenCheck token_check_;
  std::vector<std::int32_t> fetched_;
};

}  // namespace ballast::model::cuda
