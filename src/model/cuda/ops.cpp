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
    : state_(std::make_shared<SharedState>(extents, options)),
      shape_(extents.shape),
      hidden_(extents.hidden),
      vocabulary_(extents.vocabulary),
      widest_{shape_.tokens(), extents.widest_sum} {
  add_row_ops(state_, *this);
  add_attention_ops(state_, *this);
}

template <class T>
void Ops<T>::take_memory(Bump& bump) {
  products_workspace_ = bump.take<std::byte>(Products::kWorkspace, 256);
  state_->partials = bump.take<float>(partial_floats(widest_));
  // Nothing uses it. Plans count it.
  if (state_->extents.has_layer_inputs) bump.take<std::uint32_t>(2 * shape_.tokens());
  token_check_.set_memory(bump.take<std::uint32_t>(1));
  if (kFusable<T>) {
    state_->fused_workspace = bump.take<std::byte>(FusedAttention::kWorkspace, 256);
  }
  if (products_) products_->set_workspace(products_workspace_);
}

template <class T>
Products& Ops<T>::products() {
  if (!products_)
    products_.emplace(state_->options.products, state_->options.set)
        .set_workspace(products_workspace_);
  return *products_;
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

template <class T>
void Ops<T>::multiply_with(const Extents& extents, const Matrix& a, const Matrix& b,
                           const Matrix& c, const Extras& extras) {
  products().multiply(queue(), extents, a, b, c, extras);
  check(cudaSuccess, "matrix product", {extents.m, extents.n, extents.k});
}

template <class T>
void Ops<T>::linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows) {
  const Product p = forward_product(layer, x, y, y_row, rows);
  multiply_with(p.extents, p.a, p.b, p.c, {.bias = layer.bias});
}

template <class T>
void Ops<T>::linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y,
                         std::size_t rows) {
  const Product p = forward_product(layer, x, y, layer.out, rows);
  multiply_with(p.extents, p.a, p.b, p.c, {.addend = residual, .bias = layer.bias});
}

template <class T>
void Ops<T>::linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                           std::size_t rows) {
  if (layer.weight_gradient == nullptr) return;
  const Product p = weight_product(layer, x, dy, dy_row, rows);
  multiply(p.extents, p.a, p.b, p.c, !layer.overwrites_gradient);
}

template <class T>
void Ops<T>::multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                      bool add_to_c) {
  in_whole_eights(extents, a, b, c, add_to_c,
                  [&](const Extents& part, const Matrix& left, const Matrix& right,
                      const Matrix& to, bool adds) {
                    multiply_with(part, left, right, to, {.addend = adds ? to.data : nullptr});
                  });
}

template <class T>
void Ops<T>::check_tokens(const std::int32_t* tokens, std::int32_t least) {
  token_check_.enqueue(state_->stream(), tokens, shape_.tokens(), least, vocabulary_);
}

template <class T>
void Ops<T>::embed(const Embedding<const T>& tables, const Ids& ids, T* out) const {
  check(cuda::embed(queue(), tables, ids, embedding_extents(), out), "embedding",
        {shape_.tokens(), hidden_});
}

template <class T>
std::size_t Ops<T>::embedding_scratch_bytes() const {
  return 2 * shape_.tokens() * sizeof(std::uint32_t);
}

template <class T>
void Ops<T>::embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                            std::byte* scratch) const {
  check(cuda::embed_backward(queue(), ids, dy, embedding_extents(), gradients,
                             reinterpret_cast<std::uint32_t*>(scratch)),
        "gradient of the embedding", {shape_.tokens(), hidden_});
}

template <class T>
void Ops<T>::cap_logits(const LogitTile& tile) const {
  check(cuda::cap_logits(queue(), tile), "soft cap of the logits", {tile.rows, tile.width});
}

template <class T>
void Ops<T>::sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                        RowSum<float>* sums) const {
  check(cuda::sum_logits(queue(), tile, targets, first, sums), "sums of the logits",
        {tile.rows, tile.width});
}

template <class T>
void Ops<T>::merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) const {
  check(cuda::merge_row_sums(queue(), tiles, sums), "sums of the vocabulary tiles", {tiles.rows});
}

template <class T>
void Ops<T>::logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                             const float* weights, const RowSum<float>* sums) const {
  check(cuda::logit_gradients<T>(queue(), tile, targets, scale, weights, sums),
        "gradients of the logits", {tile.rows, tile.width});
}

template <class T>
void Ops<T>::row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                        double* losses) const {
  check(cuda::row_losses(queue(), sums, targets, rows, losses), "losses of the rows", {rows});
}

template <class T>
void Ops<T>::sum_losses(const double* losses, std::size_t count, std::size_t parts,
                        double* sums) const {
  check(cuda::sum_losses(queue(), losses, count, parts, sums), "sum of the losses", {count});
}

template <class T>
void Ops<T>::dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) const {
  check(cuda::dpo_loss(queue(), rows, how, results), "losses of the pairs",
        {rows.pairs, rows.length});
}

template <class T>
void Ops<T>::route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
                   const std::int32_t* targets, const Routing& to, std::int32_t* starts) const {
  check(cuda::route(queue(), shape, logits, biases, targets, to, starts, state_->partials),
        "router", {shape.rows, shape.experts});
}

template <class T>
std::span<const std::int32_t> Ops<T>::fetch(const std::int32_t* values, std::size_t count) {
  fetched_.resize(count);
  check(cudaMemcpyAsync(fetched_.data(), values, count * sizeof(std::int32_t),
                        cudaMemcpyDeviceToHost, queue()),
        "copy of numbers of rows", {count});
  state_->stream().synchronize();
  return fetched_;
}

template <class T>
void Ops<T>::add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                               const RouterTotals& totals) const {
  check(cuda::add_router_totals(queue(), shape, routing, first, totals, state_->partials),
        "totals of a router", {shape.rows, shape.experts});
}

template <class T>
void Ops<T>::router_losses(const RouterShape& shape, const RouterTotals& totals,
                           double* losses) const {
  check(cuda::router_losses(queue(), shape, totals, losses), "losses of the routers",
        {shape.rows, shape.experts});
}

template <class T>
void Ops<T>::router_gradient(const RouterShape& shape, const Routing& routing,
                             const RouterTotals& totals, const RouterLossScales& scales,
                             T* gradients) const {
  check(cuda::router_gradient(queue(), shape, routing, totals, scales, gradients),
        "gradient of a router", {shape.rows, shape.experts});
}

template <class T>
void Ops<T>::gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                         std::size_t padded, std::size_t width) const {
  check(cuda::gather_rows(queue(), rows, x, weights, y, padded, width), "rows of an expert",
        {rows.count, width});
}

template <class T>
void Ops<T>::dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                      const float* weights, float* weight_gradients, std::size_t width) const {
  check(cuda::dot_rows(queue(), rows, activated, gradients, weights, weight_gradients, width),
        "gradients of the weights of an expert's rows", {rows.count, width});
}

template <class T>
void Ops<T>::dot_bias(const ExpertRows& rows, const T* bias, const T* gradients,
                      const float* weights, float* weight_gradients, std::size_t width) const {
  check(cuda::dot_bias(queue(), rows, bias, gradients, weights, weight_gradients, width),
        "gradients of the weights of an expert's rows", {rows.count, width});
}

template <class T>
void Ops<T>::put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                           float* to) const {
  check(cuda::put_quotients(queue(), rows, values, weights, to),
        "gradients of the weights of an expert's rows", {rows.count});
}

template <class T>
void Ops<T>::add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                      std::size_t width) const {
  check(cuda::add_rows(queue(), rows, y, weights, sums, width), "results of an expert",
        {rows.count, width});
}

template <class T>
void Ops<T>::compute_dora_scales(const AdaptedRows<T>& rows, float* scales,
                                 float* inverse_norms) const {
  check(cuda::compute_dora_scales(queue(), rows, scales, inverse_norms), "norms of an adapted map",
        {rows.map.out, rows.rank});
}

template <class T>
void Ops<T>::scale_columns(const ScaledColumns<T>& columns) const {
  check(cuda::scale_columns(queue(), columns), "scales of an adapted map",
        {columns.rows, columns.width});
}

template <class T>
void Ops<T>::add_column_products(const ColumnProducts<T>& columns, float* gradient) const {
  check(cuda::add_column_products(queue(), columns, gradient, state_->partials),
        "gradients of magnitudes", {columns.rows, columns.width});
}

template class Ops<float>;
template class Ops<Bf16>;
template class Ops<F16>;

}  // namespace ballast::model::cuda
