#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ballast/engine/engine.h"
#include "ballast/formats/safetensors.h"
#include "ballast/model/family.h"
#include "ballast/model/packed_values.h"

#include "src/model/description/layer_rules.h"
#include "tests/support/stored_values.h"
#include "tests/unit/model/fixture.h"

namespace ballast::families_test {

using nlohmann::json;

/// Inputs and targets of a batch. `packed`: with the documents of the record.
struct Batch {
  Batch(const json& record, std::size_t step, bool packed = false) {
    for (const std::vector<std::int32_t> sequence : record["tokens"][step]) {
      inputs.insert(inputs.end(), sequence.begin(), sequence.end() - 1);
      targets.insert(targets.end(), sequence.begin() + 1, sequence.end());
      length = sequence.size() - 1;
      ++sequences;
    }
    counted = targets.size();
    if (packed) pack(record["packed"]);
  }
  [[nodiscard]] engine::TokenBatch view() const { return {inputs, targets, positions}; }

  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;
  std::size_t counted = 0;  ///< number of targets that count
  std::size_t sequences = 0;
  std::size_t length = 0;

 private:
  void pack(const json& record) {
    for (const std::vector<std::int32_t> lengths : record["documents"]) {
      for (const std::int32_t document : lengths) {
        for (std::int32_t i = 0; i < document; ++i) positions.push_back(i);
      }
    }
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (record["counts"][i / length][i % length] != 0) continue;
      targets[i] = -1;
      --counted;
    }
  }
};

/// Forward and backward pass of the first batch, block by block.
class FirstStep {
 public:
  FirstStep(const model::ModelConfig& config, DType type, const formats::SafetensorsReader& weights,
            const Batch& batch, step::Kept keeps = step::Kept::nothing)
      : bench_(config, type, {batch.sequences, batch.length}),
        tokens_(batch.length * batch.sequences),
        counted_(static_cast<double>(batch.counted)) {
    const auto& blocks = bench_.architecture.blocks;
    for (const model::BlockSpec& block : blocks) {
      std::vector<float> flat(block.elements);
      for (const model::TensorSpec& tensor : block.tensors) {
        std::ranges::copy(test::read_tensor(weights, tensor), flat.begin() + tensor.offset);
      }
      weights_.push_back(bench_.upload(flat));
      if (block.content == model::BlockContent::layer_embedding)
        select_rows(block, flat, batch.inputs);
      gradients_.push_back(bench_.gradient(std::vector<float>(block.trained_elements())));
    }
    run(batch, keeps);
  }

  [[nodiscard]] double loss() const { return bench_.one(loss_) / counted_; }
  /// The load-balancing loss, without its coefficient.
  [[nodiscard]] double balance_loss() const { return bench_.one(router_losses_); }
  [[nodiscard]] std::vector<double> gradient(std::size_t block, const model::TensorSpec& t) const {
    std::vector<double> all = bench_.values(gradients_[block]);
    all.resize(bench_.architecture.blocks[block].elements);  // frozen tensors have none
    std::vector<double> found(all.begin() + t.offset, all.begin() + t.offset + t.size);
    if (block == 0 && t.offset == 0 && bench_.architecture.config.tie_embeddings) {
      const std::vector<double> tied = bench_.values(tied_);
      for (std::size_t i = 0; i < found.size(); ++i) found[i] += tied[i];
    }
    return found;
  }
  /// Logits of all tokens: the final norm and the output matrix in double, from weights of the
  /// training type.
  [[nodiscard]] std::vector<double> logits(const formats::SafetensorsReader& weights) const {
    const model::Architecture& model = bench_.architecture;
    const std::size_t width = model.config.hidden_size;
    std::vector<float> gain(width);
    std::vector<float> bias(width);
    std::vector<float> output(model.config.vocab_size * width);
    weights.read(model.outer.norm.name + ".weight", gain);
    if (model.outer.norm.layer_norm && model.outer.norm.biased)
      weights.read(model.outer.norm.name + ".bias", bias);
    weights.read(model.config.tie_embeddings ? model.outer.tokens : model.outer.output, output);
    for (std::vector<float>* values : {&gain, &bias, &output}) {
      for (float& one : *values) one = bench_.type == DType::bf16 ? to_float(to_bf16(one)) : one;
    }
    for (float& one : gain) one += model.outer.norm.offset;
    const double own = model.outer.norm.epsilon;
    const double epsilon = own > 0.0 ? own : model.config.norm_epsilon;
    const double cap = model.outer.logit_cap;
    std::vector<double> found;
    for (std::size_t token = 0; token < tokens_; ++token) {
      const double* const x = last_.data() + token * width;
      double mean = 0.0;
      double squares = 0.0;
      for (std::size_t i = 0; i < width && model.outer.norm.layer_norm; ++i) {
        mean += x[i] / static_cast<double>(width);
      }
      for (std::size_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon);
      for (std::size_t v = 0; v < model.config.vocab_size; ++v) {
        double sum = 0.0;
        for (std::size_t i = 0; i < width; ++i) {
          sum += ((x[i] - mean) * factor * gain[i] + bias[i]) * output[v * width + i];
        }
        sum *= model.outer.logit_factor;
        found.push_back(cap > 0.0 ? cap * std::tanh(sum / cap) : sum);
      }
    }
    return found;
  }
  [[nodiscard]] const std::vector<model::BlockSpec>& blocks() const {
    return bench_.architecture.blocks;
  }

 private:
  /// Buffers of the half of a layer with experts.
  struct Routed {
    DeviceBytes rows;
    DeviceView<float> sums;
    std::vector<std::int32_t> starts;
    DeviceBytes residual;         ///< Port::residual
    DeviceBytes result_gradient;  ///< if the sum has a norm
    DeviceBytes normed_gradient;  ///< if they read the norm of attention
  };

  /// Rows of a table for the tokens, and their gradient.
  struct TableRows {
    DeviceBytes rows;
    DeviceView<float> gradient;
    std::vector<std::int32_t> tokens;
  };

  /// Uploads the rows of a table for the tokens, as a step does.
  void select_rows(const model::BlockSpec& table, const std::vector<float>& flat,
                   const std::vector<std::int32_t>& tokens) {
    const auto width = static_cast<std::ptrdiff_t>(table.tensors.front().shape.back());
    std::vector<float> rows;
    for (const std::int32_t token : tokens) {
      rows.insert(rows.end(), flat.begin() + token * width, flat.begin() + (token + 1) * width);
    }
    const std::vector<float> zeros(rows.size());
    rows_of_tables_[weights_.size() - 1] = {bench_.upload(rows), bench_.gradient(zeros), tokens};
  }

  /// Adds the gradients of a table's rows, as a step does.
  void scatter_rows(std::size_t table) {
    const TableRows& of = rows_of_tables_.at(table);
    const std::vector<float> rows = bench_.get(of.gradient);
    const model::BlockSpec& block = bench_.architecture.blocks[table];
    std::vector<float> gradient(block.elements);
    const model::RowGradients one = {.rows = rows, .tokens = of.tokens};
    model::scatter_rows(DType::f32, std::span(&one, 1), block.tensors.front().shape.back(),
                        std::as_writable_bytes(std::span(gradient)));
    gradients_[table] = bench_.gradient(gradient);
  }

  void run(const Batch& batch, step::Kept keeps) {
    auto& b = bench_;
    const auto inputs = b.upload_tokens(batch.inputs);
    const auto targets = b.upload_tokens(batch.targets);
    if (!batch.positions.empty()) positions_ = b.upload_tokens(batch.positions);
    const std::size_t head = b.architecture.blocks.size() - 1;
    kept_.resize(head);
    const bool attention = keeps == step::Kept::attention;
    port_of_kept_ = attention ? model::Port::kept_attention : model::Port::kept;
    const model::KernelSizes& sizes = b.compute->sizes();
    for (std::size_t i = 1; i < head && keeps != step::Kept::nothing; ++i) {
      const Bytes needed = attention ? sizes.attention[i] : sizes.intermediates[i];
      if (needed > 0) kept_[i] = b.device->allocate(needed, "intermediates");
    }
    const std::uint64_t totals = b.compute->sizes().router_totals;
    if (totals > 0) {
      totals_ = view_as<double>(b.device->allocate(totals * sizeof(double), "totals"));
      router_losses_ = view_as<double>(b.device->allocate(2 * sizeof(double), "losses"));
    }
    inputs_.push_back(b.activation());
    b.kernels().embedding_forward(*b.stream, 0, weights_[0], inputs, positions_, inputs_[0]);
    for (std::size_t i = 1; i < head; ++i) forward(i);
    b.stream->synchronize();
    last_ = b.download(inputs_.back());
    flow_ = b.activation();
    loss_ = b.number();
    const bool tied = b.architecture.config.tie_embeddings;
    tied_ = b.gradient(tied ? b.architecture.blocks[0].elements : 1);
    b.compute->zero(*b.stream, tied_);
    b.train_head(weights_[head], tied ? weights_[0] : DeviceBytes{}, inputs_.back(), targets,
                 static_cast<float>(1.0 / counted_), flow_, gradients_[head],
                 tied ? tied_ : DeviceView<float>{}, model::Accumulation::later, loss_);
    inputs_.pop_back();
    for (std::size_t i = head - 1; i >= 1; --i) backward(i);
    b.kernels().embedding_backward(*b.stream, 0, inputs, inputs, positions_, flow_, gradients_[0]);
    b.stream->synchronize();
  }

  void forward(std::size_t i) {
    auto& b = bench_;
    switch (b.architecture.blocks[i].content) {
      case model::BlockContent::layer_embedding:
        return;
      case model::BlockContent::router:
        return route(i);
      case model::BlockContent::shared_expert:
        b.kernels().tile_forward(*b.stream, i, weights_[i], positions_, routed_.back().rows,
                                 routed_.back().sums, {});
        return;
      case model::BlockContent::expert: {
        const bool last = !b.architecture.is_layer_tile(i + 1);
        const DeviceBytes out = last ? b.activation() : DeviceBytes();
        const Routed& half = routed_.back();
        b.kernels().expert_forward(*b.stream, i, weights_[i], half.rows, half.starts, half.sums,
                                   out);
        if (last) inputs_.push_back(out);
        return;
      }
      case model::BlockContent::result_norm:
        inputs_.push_back(b.activation());
        b.kernels().result_norm(*b.stream, i, weights_[i], inputs_[inputs_.size() - 2],
                                routed_.back().residual, inputs_.back());
        return;
      default:
        inputs_.push_back(b.activation());
        b.kernels().layer_forward(*b.stream, i, weights_[i], positions_,
                                  inputs_[inputs_.size() - 2], inputs_.back(), kept_[i], {},
                                  port_of_kept_, shared_by(i));
    }
  }

  /// Returns the values that the layer of block `i` shares with others.
  test::SharedValues shared_by(std::size_t i) {
    auto& b = bench_;
    const model::ModelConfig& config = b.architecture.config;
    const std::vector<model::LayerSpec>& layers = *b.architecture.layers;
    const std::uint64_t layer = b.architecture.blocks[i].layer;
    const std::uint64_t source = model::keys_of(layers, layer);
    const std::uint64_t width = config.num_layers * model::layer_input_width(layers);
    if (width > 0 && layer_inputs_.inputs.empty()) {
      layer_inputs_ = {.inputs = b.upload(std::vector<float>(tokens_ * width)),
                       .inputs_gradient = b.upload(std::vector<float>(tokens_ * width))};
    }
    test::SharedValues values = layer_inputs_;
    if (shares_norm(i + 1)) {
      if (residual_.empty()) residual_ = b.activation();
      values.residual = residual_;
      values.normed_gradient = normed_gradient_;
    }
    if (const auto rows = rows_of_tables_.find(i + 1); rows != rows_of_tables_.end()) {
      values.table_rows = rows->second.rows;
      values.table_rows_gradient = rows->second.gradient;
    }
    if (model::last_reader_of_keys(layers, source) == source) return values;
    auto& own = keys_values_[source];
    if (own.keys_values.empty()) {
      const model::HeadExtents heads = model::heads_of(layers[source], config);
      const std::vector<float> zeros(tokens_ * 2 * heads.kv_heads * heads.head_dim);
      own.keys_values = b.upload(zeros);
      own.keys_values_gradient = b.device->allocate(zeros.size() * sizeof(float), "gradient");
    }
    values.keys_values = own.keys_values;
    values.keys_values_gradient = own.keys_values_gradient;
    return values;
  }

  /// Whether block `i` is a router that reads the norm of attention.
  [[nodiscard]] bool shares_norm(std::size_t i) const {
    const model::BlockSpec& block = bench_.architecture.blocks[i];
    return block.content == model::BlockContent::router &&
           bench_.architecture.layer(block.layer).sublayers.back().reads == model::Reads::same_norm;
  }
  void route(std::size_t i) {
    auto& b = bench_;
    const std::size_t experts = b.compute->sizes().experts;
    Routed half = {.rows = b.device->allocate(b.compute->sizes().rows, "rows"),
                   .sums = b.gradient(b.activations())};
    const std::uint64_t layer = b.architecture.blocks[i].layer;
    if (b.architecture.layer(layer).sublayers.back().after) half.residual = b.activation();
    if (shares_norm(i)) half.residual = residual_;
    const DeviceView<std::int32_t> starts = b.upload_tokens(std::vector<std::int32_t>(experts + 1));
    b.kernels().route(*b.stream, i, weights_[i], inputs_.back(), {}, half.rows, half.sums,
                      {.starts = starts, .totals = totals_, .losses = router_losses_},
                      half.residual);
    half.starts = b.get(starts);
    routed_.push_back(half);
  }

  void backward(std::size_t i) {
    auto& b = bench_;
    const model::BlockContent content = b.architecture.blocks[i].content;
    if (content == model::BlockContent::layer_embedding) return;
    const auto dresults = [&] {
      const DeviceBytes apart = routed_.back().result_gradient;
      return apart.empty() ? flow_ : apart;
    };
    if (content == model::BlockContent::expert) {
      const Routed& half = routed_.back();
      b.kernels().expert_backward(*b.stream, i, weights_[i], half.rows, half.starts, dresults(),
                                  half.sums, gradients_[i]);
      return;
    }
    if (content == model::BlockContent::shared_expert) {
      const Routed& half = routed_.back();
      b.kernels().tile_backward(*b.stream, i, weights_[i], positions_, half.rows, dresults(),
                                half.sums, gradients_[i], model::Accumulation::later);
      return;
    }
    const DeviceBytes in = inputs_.back();
    inputs_.pop_back();
    if (content == model::BlockContent::result_norm) {
      routed_.back().result_gradient = b.activation();
      b.kernels().result_norm_backward(*b.stream, i, weights_[i], in, flow_, dresults(),
                                       gradients_[i]);
      return;
    }
    if (content == model::BlockContent::router) {
      const Routed& half = routed_.back();
      normed_gradient_ = shares_norm(i) ? b.activation() : DeviceBytes();
      b.kernels().router_backward(*b.stream, i, weights_[i], in, half.rows, half.sums, totals_,
                                  1.0F, flow_, gradients_[i], model::Accumulation::later,
                                  normed_gradient_);
      routed_.pop_back();
      return;
    }
    b.kernels().layer_backward(*b.stream, i, weights_[i], positions_, in, flow_, gradients_[i],
                               model::Accumulation::later, kept_[i], {}, port_of_kept_,
                               shared_by(i));
    if (rows_of_tables_.contains(i + 1)) scatter_rows(i + 1);
  }

  test::Bench bench_;
  std::size_t tokens_;
  double counted_;
  std::vector<DeviceBytes> weights_;
  std::vector<DeviceView<float>> gradients_;
  DeviceView<float> tied_;
  DeviceView<double> loss_;
  std::vector<double> last_;  ///< activations before the head
  DeviceView<const std::int32_t> positions_;
  std::vector<DeviceBytes> inputs_;  ///< inputs of the blocks whose backward pass is still to come
  DeviceBytes residual_;             ///< Port::residual of the layer's experts
  DeviceBytes normed_gradient_;      ///< Port::normed_gradient
  std::vector<Routed> routed_;       ///< buffers of these blocks' experts
  std::vector<DeviceBytes> kept_;    ///< kept intermediates by block
  model::Port port_of_kept_ = model::Port::kept;
  test::SharedValues layer_inputs_;
  std::map<std::size_t, TableRows> rows_of_tables_;          ///< by block of the table
  std::map<std::uint64_t, test::SharedValues> keys_values_;  ///< by layer that computes them
  DeviceBytes flow_;
  DeviceView<double> totals_;
  DeviceView<double> router_losses_;
};

}  // namespace ballast::families_test
