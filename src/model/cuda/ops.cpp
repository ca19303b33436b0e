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
      widest_{shape_.tokens(), extents.widest_sum},
      epsilon_(extents.epsilon) {
  add_attention_ops(state_, *this);
}

template <class T>
void Ops<T>::take_memory(Bump& bump) {
  products_workspace_ = bump.take<std::byte>(Products::kWorkspace, 256);
  partials_ = bump.take<float>(partial_floats(widest_));
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
void Ops<T>::norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows,
                  const T* residual) const {
  check(cuda::norm(queue(), x, weights.weight, weights.bias, epsilon_, residual, y, {rows, hidden_},
                   {}, weights.offset),
        "norm", {rows, hidden_});
}

template <class T>
void Ops<T>::norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual,
                           T* dx, std::size_t rows) const {
  check(cuda::norm_backward(queue(), x, weights.weight, dy, epsilon_, residual, dx,
                            weights.weight_gradient, weights.bias_gradient, partials_,
                            {rows, hidden_}, {}, weights.offset, weights.bias != nullptr),
        "gradient of norm", {rows, hidden_});
}

template <class T>
void Ops<T>::norm_groups(const Norm<T>& weights, const Groups& groups, const T* x,
                         std::size_t x_step, T* y, std::size_t y_step) const {
  const float epsilon = weights.epsilon_or(epsilon_);
  check(cuda::norm<T>(queue(), x, weights.weight, nullptr, epsilon, nullptr, y,
                      {groups.rows * groups.count, groups.width}, {groups.count, x_step, y_step},
                      weights.offset),
        "norm of queries or keys", {groups.rows, groups.count, groups.width});
}

template <class T>
void Ops<T>::norm_groups_backward(const Norm<T>& weights, const Groups& groups, const T* x,
                                  std::size_t x_step, T* dy, std::size_t dy_step) const {
  const float epsilon = weights.epsilon_or(epsilon_);
  check(cuda::norm_backward<T>(queue(), x, weights.weight, dy, epsilon, nullptr, dy,
                               weights.weight_gradient, nullptr, partials_,
                               {groups.rows * groups.count, groups.width},
                               {groups.count, x_step, dy_step}, weights.offset),
        "gradient of a norm of queries or keys", {groups.rows, groups.count, groups.width});
}

template <class T>
void Ops<T>::activate(Activation f, const T* x, T* y, std::size_t size) const {
  check(cuda::activate(queue(), f, x, y, size), "activation", {size});
}

template <class T>
void Ops<T>::activate_backward(Activation f, const T* x, T* d, float* bias_gradient,
                               std::size_t rows, std::size_t width) const {
  check(cuda::activate_backward(queue(), f, x, d, rows * width), "gradient of an activation",
        {rows, width});
  if (bias_gradient != nullptr) add_column_sums(d, width, bias_gradient, rows, width);
}

template <class T>
void Ops<T>::glu(const Gating& how, const GateUp<T>& in, T* y) const {
  check(cuda::glu(queue(), how, in.gate, in.up, in.step, y, {in.rows, in.width}), "gate",
        {in.rows, in.width});
}

template <class T>
void Ops<T>::glu_backward(const Gating& how, const GateUp<T>& in, const T* dy) const {
  check(cuda::glu_backward(queue(), how, in.gate, in.up, in.step, dy, {in.rows, in.width}),
        "gradient of a gate", {in.rows, in.width});
}

template <class T>
void Ops<T>::add_column_sums(const T* x, std::size_t step, float* gradient, std::size_t rows,
                             std::size_t width) const {
  check(cuda::add_column_sums(queue(), x, step, gradient, partials_, {rows, width}),
        "gradient of a bias", {rows, width});
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
void Ops<T>::put(std::span<const float> values, float* to) const {
  check(cuda::put_values(queue(), values, to), "copy of values", {values.size()});
}

template <class T>
void Ops<T>::route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
                   const std::int32_t* targets, const Routing& to, std::int32_t* starts) const {
  check(cuda::route(queue(), shape, logits, biases, targets, to, starts, partials_), "router",
        {shape.rows, shape.experts});
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
  check(cuda::add_router_totals(queue(), shape, routing, first, totals, partials_),
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
void Ops<T>::add_sum(const float* values, std::size_t count, float* sum) const {
  check(add_partials(queue(), {values, count, 1}, sum, nullptr), "sum of an expert's rows",
        {count});
}

template <class T>
void Ops<T>::add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) const {
  if (bias == nullptr) return;
  check(cuda::add_bias(queue(), bias, y, rows, width), "bias of an expert", {rows, width});
}

template <class T>
void Ops<T>::add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                      std::size_t width) const {
  check(cuda::add_rows(queue(), rows, y, weights, sums, width), "results of an expert",
        {rows.count, width});
}

template <class T>
void Ops<T>::scale(T* x, float factor, std::size_t size) const {
  check(cuda::scale(queue(), x, factor, size), "scale of an adapter", {size});
}

template <class T>
void Ops<T>::scale_by(const T* addends, std::size_t count, T* x, std::size_t size) const {
  check(cuda::scale_by(queue(), addends, count, x, size), "scale of a layer", {size});
}

template <class T>
void Ops<T>::drop(const DropoutMask& mask, const T* x, T* y, std::size_t size,
                  bool add_to_y) const {
  check(cuda::drop(queue(), mask, x, y, size, add_to_y), "dropout", {size});
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
  check(cuda::add_column_products(queue(), columns, gradient, partials_), "gradients of magnitudes",
        {columns.rows, columns.width});
}

template <class T>
void Ops<T>::zero(float* values, std::size_t size) const {
  if (size == 0) return;
  check(cudaMemsetAsync(values, 0, size * sizeof(float), queue()), "clearing gradients", {size});
}
template <class T>
void Ops<T>::zero(device::Stream& stream, float* values, std::size_t size) const {
  if (size == 0) return;
  device::check_cuda(
      cudaMemsetAsync(values, 0, size * sizeof(float), device::as_cuda(stream).native()),
      "clearing gradients");
}

template <class T>
void Ops<T>::widen(const T* x, float* y, std::size_t size) const {
  check(cuda::widen(queue(), x, y, size), "conversion to fp32", {size});
}

template <class T>
void Ops<T>::accumulate(const float* part, float* sums, std::size_t size) const {
  check(cuda::accumulate(queue(), part, sums, size), "sum of the tiles", {size});
}

template <class T>
void Ops<T>::forget_sum_rows(std::uint32_t* sum_row_of, std::size_t rows) const {
  static_assert(kNoSumRow == 0xFFFFFFFFU);
  check(cudaMemsetAsync(sum_row_of, 0xFF, rows * sizeof(std::uint32_t), queue()),
        "clearing the sum rows of tokens", {rows});
}

template <class T>
void Ops<T>::find_sum_rows(const Ids& ids, std::size_t first, std::size_t rows,
                           std::uint32_t* sum_row_of) const {
  check(cuda::find_sum_rows(queue(), ids, shape_.tokens(), {first, rows, sum_row_of}),
        "finding the sum rows of tokens", {shape_.tokens()});
}

template <class T>
void Ops<T>::pack(const UnpackedGradient& from, T* packed, std::size_t size, GradientStats* partial,
                  GradientStats* stats) const {
  check(cuda::pack_gradient(queue(), from, packed, size, partial, stats), "packing a gradient",
        {size});
}

template <class T>
void Ops<T>::measure(device::Stream& stream, const T* packed, std::size_t size,
                     GradientStats* partial, GradientStats* stats) const {
  device::check_cuda(
      cuda::measure_gradient(device::as_cuda(stream).native(), packed, size, partial, stats),
      "statistics of a gradient");
}

template <class T>
void Ops<T>::encode(device::Stream& stream, const T* weights, std::size_t blocks,
                    std::int8_t* codes, float* scales) const {
  device::check_cuda(
      cuda::quantize_weights(device::as_cuda(stream).native(), weights, blocks, codes, scales),
      "encoding weights");
}

template <class T>
void Ops<T>::decode(device::Stream& stream, const std::int8_t* codes, const float* scales,
                    std::size_t blocks, T* weights) const {
  device::check_cuda(
      cuda::dequantize_weights(device::as_cuda(stream).native(), codes, scales, blocks, weights),
      "decoding weights");
}

template <class T>
void Ops<T>::dequantize_base(const QuantizedMatrix& matrix, T* out) const {
  check(cuda::dequantize_base(queue(), matrix, out), "decoding a quantised base",
        {matrix.arrays.elements});
}

template <class T>
void Ops<T>::copy_bytes(const std::byte* from, std::byte* to, std::size_t size) const {
  check(cuda::copy_bytes(queue(), from, to, size), "copying weights", {size});
}

template class Ops<float>;
template class Ops<Bf16>;
template class Ops<F16>;

}  // namespace ballast::model::cuda
