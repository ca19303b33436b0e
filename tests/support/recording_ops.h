#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/model/ops/device_ops.h"
#include "tests/support/call_log.h"
#include "tests/support/show_arguments.h"

namespace ballast::test {

using model::Activation;
using model::GateUp;
using model::Gating;
using model::Groups;
using model::GroupSteps;
using model::Linear;
using model::Norm;

/// Operations of a device that compute nothing: they write their calls to a log. Sizes of scratch
/// memory, chunks and routings are chosen so that all cases of their callers occur in small models,
/// and depend on no device. Work runs at once.
template <class T>
class RecordingOps : public model::NormOps<T>,
                     public model::ElementwiseOps<T>,
                     public model::PackingOps<T>,
                     public model::ProductOps<T>,
                     public model::AdapterOps<T>,
                     public model::RouterOps<T>,
                     public model::ExpertOps<T>,
                     public model::TokenOps<T>,
                     public model::LossOps<T>,
                     public model::HeadOps<T>,
                     public model::AttentionOps<T>,
                     public model::MixerOps<T>,
                     public model::LinkOps<T>,
                     public model::WorkQueue {
 public:
  explicit RecordingOps(CallLog& log) : log_(&log) {}

  void run(device::Stream& /*stream*/, std::function<void()> work) override {
    log_->call("run");
    work();
  }
  [[nodiscard]] std::string arithmetic() const override { return {}; }
  void take_memory(Bump& bump) override { bump.take<float>(480); }

  void fill_angles(const model::Rotary& rotary, const model::Angles& angles,
                   const std::int32_t* positions) override {
    log_->call("fill_angles", rotary, angles, positions);
  }
  void rotate(T* x, std::size_t heads, const model::Angles& angles, const std::int32_t* positions,
              float direction) override {
    log_->call("rotate", x, heads, angles, positions, direction);
  }
  void copy_groups(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                   const GroupSteps& to_steps, std::size_t zeros) override {
    log_->call("copy_groups", groups, from, from_steps, to, to_steps, zeros);
  }
  void sum_groups(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                  std::size_t to_row) override {
    log_->call("sum_groups", groups, from, steps, to, to_row);
  }
  void regroup(const model::Regrouping& how, const T* from, T* to) override {
    log_->call("regroup", how, from, to);
  }
  void use_heads(std::size_t number) override { log_->call("use_heads", number); }
  [[nodiscard]] std::size_t attention_scratch_bytes() const override { return 3840; }
  void attention(const model::AttentionMask& mask, const model::AttentionSinks<T>& sinks,
                 const T* qkv, T* out, float* log_sums, std::byte* scratch) override {
    log_->call("attention", mask, sinks, qkv, out, log_sums, scratch);
  }
  void attention_backward(const model::AttentionMask& mask, const model::AttentionSinks<T>& sinks,
                          const T* qkv, const T* out, const float* log_sums, const T* dout, T* dqkv,
                          std::byte* scratch) override {
    log_->call("attention_backward", mask, sinks, qkv, out, log_sums, dout, dqkv, scratch);
  }

  /// A size that no other memory has.
  [[nodiscard]] std::size_t scratch_bytes() const override { return 7936; }
  void convolve(const model::Convolution<T>& how, const T* x, T* y, std::byte* scratch) override {
    log_->call("convolve", how, x, y, scratch);
  }
  void convolve_backward(const model::Convolution<T>& how, const T* x, T* dy,
                         std::byte* scratch) override {
    log_->call("convolve_backward", how, x, dy, scratch);
  }
  [[nodiscard]] std::size_t convolution_scratch_bytes(
      const model::ConvolutionShape& /*shape*/) const override {
    return 1728;
  }
  void gated_convolve(const model::Convolution<T>& how, const T* x, T* y,
                      std::byte* scratch) override {
    log_->call("gated_convolve", how, how.shape, how.bias, how.bias_gradient, x, y, scratch);
  }
  void gated_convolve_backward(const model::Convolution<T>& how, const T* x, const T* dy, T* dx,
                               std::byte* scratch) override {
    log_->call("gated_convolve_backward", how, how.shape, how.bias, how.bias_gradient, x, dy, dx,
               scratch);
  }
  void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) override {
    log_->call("gated_norm", weights, x, gate, y);
  }
  void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy, T* dgate,
                           std::byte* scratch) override {
    log_->call("gated_norm_backward", weights, x, gate, dy, dgate, scratch);
  }
  void recur(const model::DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) override {
    log_->call("recur", in, out, states, scratch);
  }
  void recur_backward(const model::DeltaInputs<T>& in, const float* states, const T* dout,
                      const model::DeltaGradients<T>& to, std::byte* scratch) override {
    log_->call("recur_backward", in, states, dout, to, scratch);
  }
  void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                   std::size_t width) override {
    log_->call("output_gate", x, gate, gate_step, y, rows, width);
  }
  void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                            std::size_t width) override {
    log_->call("output_gate_backward", x, gate, gate_step, dy, rows, width);
  }

  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) override {
    log_->call("sum_columns", x, step, rows, width, adds, sums);
  }
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) override {
    log_->call("add_sums", sums, rows, width, x, step);
  }
  void mix_rows(const model::TokenRows<const T>& rows, const model::TokenMix& how, const T* x,
                std::size_t step, T* y) override {
    log_->call("mix_rows", rows, how, x, step, y);
  }
  void mix_rows_backward(const model::TokenRows<const T>& dy, const model::TokenMix& how,
                         float* of_rows, T* dx, std::size_t step) override {
    log_->call("mix_rows_backward", dy, how, of_rows, dx, step);
  }

  void norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows,
            const T* residual) override {
    log_->call("norm", weights, x, y, rows, residual);
  }
  void norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual, T* dx,
                     std::size_t rows) override {
    log_->call("norm_backward", weights, x, dy, residual, dx, rows);
  }
  void norm_groups(const Norm<T>& weights, const Groups& groups, const T* x, std::size_t x_step,
                   T* y, std::size_t y_step) override {
    log_->call("norm_groups", weights, groups, x, x_step, y, y_step);
  }
  void norm_groups_backward(const Norm<T>& weights, const Groups& groups, const T* x,
                            std::size_t x_step, T* dy, std::size_t dy_step) override {
    log_->call("norm_groups_backward", weights, groups, x, x_step, dy, dy_step);
  }
  void activate(Activation f, const T* x, T* y, std::size_t size) override {
    log_->call("activate", f, x, y, size);
  }
  void activate_backward(Activation f, const T* x, T* d, float* bias_gradient, std::size_t rows,
                         std::size_t width) override {
    log_->call("activate_backward", f, x, d, bias_gradient, rows, width);
  }
  void glu(const Gating& how, const GateUp<T>& in, T* y) override {
    log_->call("gate", how, in, y);
  }
  void glu_backward(const Gating& how, const GateUp<T>& in, const T* dy) override {
    log_->call("gate_backward", how, in, dy);
  }
  void add_column_sums(const T* x, std::size_t step, float* gradient, std::size_t rows,
                       std::size_t width) override {
    log_->call("add_column_sums", x, step, gradient, rows, width);
  }
  void put(std::span<const float> values, float* to) override {
    log_->call("put", values.size(), to);
  }
  void add_sum(const float* values, std::size_t count, float* sum) override {
    log_->call("add_sum", values, count, sum);
  }
  void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) override {
    log_->call("add_bias", bias, y, rows, width);
  }
  void scale(T* x, float factor, std::size_t size) override {
    log_->call("scale", x, factor, size);
  }
  void scale_by(const T* addends, std::size_t count, T* x, std::size_t size) override {
    log_->call("scale_by", addends, count, x, size);
  }
  void drop(const model::DropoutMask& mask, const T* x, T* y, std::size_t size,
            bool add_to_y) override {
    log_->call("drop", mask, x, y, size, add_to_y);
  }
  void zero(float* values, std::size_t size) override { log_->call("zero", values, size); }
  void zero(device::Stream& /*stream*/, float* values, std::size_t size) override {
    zero(values, size);
  }
  void widen(const T* x, float* y, std::size_t size) override { log_->call("widen", x, y, size); }
  void accumulate(const float* part, float* sums, std::size_t size) override {
    log_->call("accumulate", part, sums, size);
  }
  void copy_bytes(const std::byte* from, std::byte* to, std::size_t size) override {
    log_->call("copy_bytes", from, to, size);
  }
  void forget_sum_rows(std::uint32_t* sum_row_of, std::size_t rows) override {
    log_->call("forget_sum_rows", sum_row_of, rows);
  }
  void find_sum_rows(const model::Ids& ids, std::size_t first, std::size_t rows,
                     std::uint32_t* sum_row_of) override {
    log_->call("find_sum_rows", ids, first, rows, sum_row_of);
  }
  void pack(const model::UnpackedGradient& from, T* packed, std::size_t size,
            GradientStats* partial, GradientStats* stats) override {
    log_->call("pack", from, packed, size, partial, stats);
  }
  void measure(device::Stream& /*stream*/, const T* packed, std::size_t size,
               GradientStats* partial, GradientStats* stats) override {
    log_->call("measure", packed, size, partial, stats);
  }
  void encode(device::Stream& /*stream*/, const T* weights, std::size_t blocks, std::int8_t* codes,
              float* scales) override {
    log_->call("encode", weights, blocks, codes, scales);
  }
  void decode(device::Stream& /*stream*/, const std::int8_t* codes, const float* scales,
              std::size_t blocks, T* weights) override {
    log_->call("decode", codes, scales, blocks, weights);
  }
  void dequantize_base(const model::QuantizedMatrix& matrix, T* out) override {
    log_->call("dequantize_base", matrix, out);
  }

  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row,
              std::size_t rows) override {
    log_->call("linear", layer, x, y, y_row, rows);
  }
  void linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y,
                   std::size_t rows) override {
    log_->call("linear_onto", layer, x, residual, y, rows);
  }
  void linear_part(const Linear<T>& layer, const T* x, float* part, std::size_t rows) override {
    log_->call("linear_part", layer, x, part, rows);
  }
  void linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                     std::size_t rows) override {
    log_->call("linear_weight", layer, x, dy, dy_row, rows);
  }
  void multiply(const model::Extents& extents, const model::Matrix& a, const model::Matrix& b,
                const model::Matrix& c, bool add_to_c) override {
    log_->call("multiply", extents, a, b, c, add_to_c);
  }
  void compute_dora_scales(const model::AdaptedRows<T>& rows, float* scales,
                           float* inverse_norms) override {
    log_->call("compute_dora_scales", rows, scales, inverse_norms);
  }
  void scale_columns(const model::ScaledColumns<T>& columns) override {
    log_->call("scale_columns", columns);
  }
  void add_column_products(const model::ColumnProducts<T>& columns, float* gradient) override {
    log_->call("add_column_products", columns, gradient);
  }
  void route(const model::RouterShape& shape, float* logits, const model::RouterBiases<T>& biases,
             const std::int32_t* targets, const model::Routing& to, std::int32_t* starts) override {
    log_->call("route", shape, logits, biases, targets, to, starts);
    routed_ = shape.choices();
  }
  void add_router_totals(const model::RouterShape& shape, const model::Routing& routing, bool first,
                         const model::RouterTotals& totals) override {
    log_->call("add_router_totals", shape, routing, first, totals);
  }
  void put_choices(std::span<const double> choices, const model::RouterTotals& totals) override {
    log_->call("put_choices", choices.size(), totals);
  }
  void router_losses(const model::RouterShape& shape, const model::RouterTotals& totals,
                     double* losses) override {
    log_->call("router_losses", shape, totals, losses);
  }
  void router_gradient(const model::RouterShape& shape, const model::Routing& routing,
                       const model::RouterTotals& totals, const model::RouterLossScales& scales,
                       T* gradients) override {
    log_->call("router_gradient", shape, routing, totals, scales, gradients);
  }
  void gather_rows(const model::ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) override {
    log_->call("gather_rows", rows, x, weights, y, padded, width);
  }
  void dot_rows(const model::ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) override {
    log_->call("dot_rows", rows, activated, gradients, weights, weight_gradients, width);
  }
  void dot_bias(const model::ExpertRows& rows, const T* bias, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) override {
    log_->call("dot_bias", rows, bias, gradients, weights, weight_gradients, width);
  }
  void put_quotients(const model::ExpertRows& rows, const float* values, const float* weights,
                     float* to) override {
    log_->call("put_quotients", rows, values, weights, to);
  }
  void add_rows(const model::ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) override {
    log_->call("add_rows", rows, y, weights, sums, width);
  }
  void check_tokens(const std::int32_t* tokens, std::int32_t least) override {
    log_->call("check_tokens", tokens, least);
  }
  void embed(const model::Embedding<const T>& tables, const model::Ids& ids, T* out) override {
    log_->call("embed", tables, ids, out);
  }
  void embed_backward(const model::Ids& ids, const T* dy, const model::Embedding<float>& gradients,
                      std::byte* scratch) override {
    log_->call("embed_backward", ids, dy, gradients, scratch);
  }
  void cap_logits(const model::LogitTile& tile) override { log_->call("cap_logits", tile); }
  void sum_logits(const model::LogitTile& tile, const std::int32_t* targets, bool first,
                  model::RowSum<float>* sums) override {
    log_->call("sum_logits", tile, targets, first, sums);
  }
  void merge_row_sums(const model::RowSumsOfTiles& tiles, model::RowSum<float>* sums) override {
    log_->call("merge_row_sums", tiles, sums);
  }
  void logit_gradients(const model::LogitTile& tile, const std::int32_t* targets, float scale,
                       const float* weights, const model::RowSum<float>* sums) override {
    log_->call("logit_gradients", tile, targets, scale, weights, sums);
  }
  void row_losses(const model::RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                  double* losses) override {
    log_->call("row_losses", sums, targets, rows, losses);
  }
  void sum_losses(const double* losses, std::size_t count, std::size_t parts,
                  double* sums) override {
    log_->call("sum_losses", losses, count, parts, sums);
  }
  void dpo_loss(const model::PairRows& rows, const model::Preference& how,
                model::PairResult* results) override {
    log_->call("dpo_loss", rows, how, results);
  }
  void linear_input(const Linear<T>& layer, const T* dy, std::size_t dy_row, T* dx,
                    std::size_t rows, bool add_to_dx) override {
    log_->call("linear_input", layer, dy, dy_row, kTypeOf<T>, dx, rows, add_to_dx);
  }
  void linear_input_part(const Linear<T>& layer, const T* dy, std::size_t dy_row, float* dx,
                         std::size_t rows, bool add_to_dx) override {
    log_->call("linear_input", layer, dy, dy_row, DType::f32, dx, rows, add_to_dx);
  }
  [[nodiscard]] std::size_t embedding_scratch_bytes() const override { return 5888; }
  /// Returns where the choices of each expert begin: the more, the higher its number; the first has
  /// none.
  [[nodiscard]] std::span<const std::int32_t> fetch(const std::int32_t* values,
                                                    std::size_t count) override {
    log_->call("fetch", values, count);
    const std::size_t experts = count - 1;
    fetched_.assign(count, 0);
    for (std::size_t e = 1; e < experts; ++e) {
      fetched_[e + 1] =
          static_cast<std::int32_t>(routed_ * e * e / ((experts - 1) * (experts - 1)));
    }
    fetched_.back() = static_cast<std::int32_t>(routed_);
    return fetched_;
  }

 private:
  CallLog* log_;
  std::size_t routed_ = 0;  ///< choices of the last router
  std::vector<std::int32_t> fetched_;
};

/// Makes operations that all write to `log`, which must outlive them.
template <class T>
model::DeviceOps<T> recording_ops(CallLog& log, const model::MlpRule& mlp_rule) {
  const auto all = std::make_shared<RecordingOps<T>>(log);
  // Logits of 32 rows, up to 64 tokens wide. Larger vocabularies are summed in parts.
  const model::DeviceTraits traits = {
      .mlp = mlp_rule, .logit_bytes = 8192, .sums_in_parts = [](std::size_t extent) {
        return extent > 64;
      }};
  return {all, all, all, all, all, all, all, all, all, all, all, all, all, all, traits};
}

}  // namespace ballast::test
