#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/weight_codes.h"
#include "ballast/model/compute.h"

#include "src/model/compute/cleared.h"
#include "src/model/compute/expert_exchange.h"
#include "src/model/compute/experts.h"
#include "src/model/compute/head.h"
#include "src/model/compute/layer_makers.h"

namespace ballast::model {

/// Compute with the operations of one device (layer.h). `Ops::run(stream, work)` runs or enqueues
/// work that calls operations; operations with a stream parameter enqueue themselves.
template <class Ops>
class ComputeBy final : public Compute {
 public:
  using T = typename Ops::Value;

  /// `about_ops`: further constructor arguments of Ops.
  template <class... AboutOps>
  ComputeBy(const Architecture& model, MicroBatchShape shape, AboutOps&&... about_ops)
      : model_(model),
        shape_(shape),
        ops_(config_of_tile(model_.config), shape, std::forward<AboutOps>(about_ops)...),
        tile_sums_(model_, shape.tokens(), ops_),
        head_(model_, shape, ops_, tile_sums_),
        experts_(model_, shape.tokens(), ops_),
        layer_(make_layer(model_, attention_shape(config_of_tile(model_.config), shape), ops_)),
        final_norm_(
            find_norm(model_.blocks[model_.head()], model_.outer.norm, model_.outer.norm_offset)) {
    if (model_.outer.scales_tokens) {
      expects(model_.outer.positions.empty(), "an embedding with positions is not scaled");
      token_scale_ = rounded(std::sqrt(static_cast<double>(model_.config.hidden_size)));
    }
    memory_.rows = std::max<Bytes>({head_.rows_bytes(), experts_.rows_bytes(),
                                    model_.config.layer_tiles > 1 ? activation_bytes() : 0});
    memory_.experts = experts_.experts();
    memory_.router_totals = experts_.empty() ? 0 : RouterTotals::values(memory_.experts);
    memory_.intermediates.resize(model_.blocks.size());
    memory_.intermediates[model_.head()] = round_up(head_.one_pass_bytes(), kPage);
    for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
      const BlockSpec& block = model_.blocks[b];
      cleared_.push_back(cleared_ranges(model_, block));
      memory_.cleared.push_back(elements_in(cleared_.back()) * sizeof(float));
      largest_block_ = std::max<std::size_t>(largest_block_, block.own_elements());
      if (!is_in_one_piece(b)) continue;
      memory_.intermediates[b] = round_up(layer_->intermediate_bytes(true, block.part), kPage);
    }
    memory_.workspace = lay_out(nullptr);
  }

  Bytes activation_bytes() const override {
    return shape_.tokens() * model_.config.hidden_size * sizeof(T);
  }
  const KernelSizes& memory() const override { return memory_; }
  std::string arithmetic() const override { return ops_.arithmetic(); }
  void set_workspace(DeviceBytes workspace) override {
    expects(workspace.size() >= memory_.workspace,
            "the workspace is smaller than memory().workspace");
    lay_out(workspace.raw());
    ready_ = true;
  }

  void embedding_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                         DeviceView<const std::int32_t> tokens,
                         DeviceView<const std::int32_t> positions, DeviceBytes out) override {
    run(stream, [=, this] {
      ops_.check_tokens(tokens.raw(), 0);
      ops_.embed(tables<const T>(block, as<T>(weights)), {tokens.raw(), positions.raw()},
                 as<T>(out));
    });
  }
  void embedding_backward(device::Stream& stream, std::size_t block,
                          DeviceView<const std::int32_t> tokens,
                          DeviceView<const std::int32_t> positions, ConstDeviceBytes dy,
                          DeviceView<float> gradient) override {
    run(stream, [=, this] {
      ops_.check_tokens(tokens.raw(), 0);
      ops_.embed_backward({tokens.raw(), positions.raw()}, as<T>(dy),
                          tables<float>(block, gradient.raw()), scratch_);
    });
  }
  void layer_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     DeviceView<const std::int32_t> positions, ConstDeviceBytes in, DeviceBytes out,
                     DeviceBytes kept, Dropout dropout, Subject subject) override {
    expect_layer(block, kept);
    run(stream, [=, this] {
      const BlockWeights<T> about{.layer = block - model_.first_layer(),
                                  .weights = as<T>(weights),
                                  .dropout = dropout,
                                  .subject = subject};
      layer_->forward(about, positions.raw(), as<T>(in), as<T>(out), kept.raw());
    });
  }
  void layer_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                      DeviceView<const std::int32_t> positions, ConstDeviceBytes in, DeviceBytes dy,
                      DeviceView<float> gradient, Accumulation accumulation, DeviceBytes kept,
                      Dropout dropout) override {
    expect_layer(block, kept);
    run(stream, [=, this] {
      const BlockWeights<T> about{block - model_.first_layer(), as<T>(weights), gradient,
                                  accumulation, dropout};
      layer_->backward(about, positions.raw(), as<T>(in), as<T>(dy), kept.raw());
    });
  }

  void normalize(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                 ConstDeviceBytes in, DeviceBytes rows, DeviceView<float> sums) override {
    const NormAt norm = norm_before_tiles(block);
    expect_rows(rows);
    run(stream, [=, this] {
      const BlockWeights<T> about{.weights = as<T>(weights)};
      ops_.norm(about[norm], as<T>(in), as<T>(rows), shape_.tokens());
      if (!sums.empty()) ops_.widen(as<T>(in), sums.raw(), sums.size());
    });
  }
  void tile_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                    DeviceView<const std::int32_t> positions, DeviceBytes rows,
                    DeviceView<float> sums, DeviceBytes out) override {
    expect_layer_tile(block);
    expect_rows(rows);
    const bool shared = model_.blocks[block].part == LayerPart::shared_expert;
    run(stream, [=, this] {
      if (shared) {
        const BlockWeights<T> about{.weights = as<T>(weights)};
        return experts_.shared_forward(block, about, rows.raw(), sums.raw());
      }
      layer_->forward_tile({block - model_.first_layer(), as<T>(weights), {}}, positions.raw(),
                           as<T>(rows), sums.raw());
      if (!out.empty()) tile_sums_.round(sums.raw(), as<T>(out));
    });
  }
  void tile_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     DeviceView<const std::int32_t> positions, DeviceBytes rows,
                     ConstDeviceBytes dy, DeviceView<float> sums, DeviceView<float> gradient,
                     Accumulation accumulation) override {
    expect_layer_tile(block);
    expect_rows(rows);
    // The last tile of the half comes first.
    const bool adds = model_.is_layer_tile(block + 1);
    const bool shared = model_.blocks[block].part == LayerPart::shared_expert;
    run(stream, [=, this] {
      if (shared) {
        const BlockWeights<T> about{
            .weights = as<T>(weights), .gradient = gradient, .accumulation = accumulation};
        return experts_.shared_backward(block, about, rows.raw(), as<T>(dy), sums.raw());
      }
      layer_->backward_tile({block - model_.first_layer(), as<T>(weights), gradient, accumulation},
                            positions.raw(), as<T>(rows), as<T>(dy), sums.raw(), adds);
    });
  }
  void norm_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     ConstDeviceBytes in, DeviceView<float> sums, DeviceBytes dy,
                     DeviceView<float> gradient) override {
    expects(block != model_.head(), "the gradient of the final norm is a part of the head's end");
    const NormAt norm = norm_before_tiles(block);
    run(stream, [=, this] {
      const BlockWeights<T> about{.weights = as<T>(weights), .gradient = gradient};
      tile_sums_.norm_backward(about[norm], as<T>(in), sums.raw(), as<T>(dy), as<T>(dy));
    });
  }

  void route(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
             ConstDeviceBytes in, DeviceView<const std::int32_t> targets, DeviceBytes rows,
             DeviceView<float> sums, const RouterResults& results) override {
    normalize(stream, block, weights, in, rows, sums);
    run(stream, [=, this] {
      const BlockWeights<T> about{.weights = as<T>(weights)};
      experts_.route(block, about, targets.raw(), rows.raw(), results.starts.raw(),
                     results.totals.raw(), results.losses.raw());
    });
  }
  void expert_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                      DeviceBytes rows, ExpertChoices choices, DeviceView<float> sums,
                      DeviceBytes out) override {
    expect_expert(block, rows);
    run(stream, [=, this] {
      const BlockWeights<T> about{.weights = as<T>(weights)};
      experts_.forward(block, about, rows.raw(), choices.first, choices.count, sums.raw());
      if (!out.empty()) tile_sums_.round(sums.raw(), as<T>(out));
    });
  }
  void expert_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                       DeviceBytes rows, ExpertChoices choices, ConstDeviceBytes dy,
                       DeviceView<float> sums, DeviceView<float> gradient) override {
    expect_expert(block, rows);
    // The last expert comes first.
    const bool begins = !model_.is_layer_tile(block + 1);
    run(stream, [=, this] {
      if (begins) ops_.zero(sums.raw(), sums.size());
      const BlockWeights<T> about{.weights = as<T>(weights), .gradient = gradient};
      experts_.backward(block, about, rows.raw(), choices.first, choices.count, as<T>(dy),
                        sums.raw());
    });
  }
  void shared_experts_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                              DeviceBytes rows, const SharedChoices& choices, RowExchange& exchange,
                              DeviceView<float> sums, DeviceBytes out) override {
    expect_expert(block, rows);
    const BlockWeights<T> about{.weights = as<T>(weights)};
    exchange_rows(stream, exchange).forward(block, about, rows.raw(), choices, sums.raw());
    if (out.empty()) return;
    run(stream, [=, this] { tile_sums_.round(sums.raw(), as<T>(out)); });
  }
  void shared_experts_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                               DeviceBytes rows, const SharedChoices& choices,
                               RowExchange& exchange, ConstDeviceBytes dy, DeviceView<float> sums,
                               DeviceView<float> gradient) override {
    expect_expert(block, rows);
    if (!model_.is_layer_tile(block + 1)) zero(stream, sums);
    const BlockWeights<T> about{.weights = as<T>(weights), .gradient = gradient};
    exchange_rows(stream, exchange)
        .backward(block, about, rows.raw(), choices, as<T>(dy), sums.raw());
  }
  void router_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                       ConstDeviceBytes in, DeviceBytes rows, DeviceView<float> sums,
                       DeviceView<double> totals, float scale, DeviceBytes dy,
                       DeviceView<float> gradient, Accumulation accumulation) override {
    expect_rows(rows);
    run(stream, [=, this] {
      const BlockWeights<T> about{
          .weights = as<T>(weights), .gradient = gradient, .accumulation = accumulation};
      experts_.router_backward(block, about, rows.raw(), totals.raw(), scale, sums.raw());
    });
    norm_backward(stream, block, weights, in, sums, dy, gradient);
  }

  void head_forward(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes output,
                    ConstDeviceBytes in, DeviceView<const std::int32_t> targets,
                    const HeadLosses& losses) override {
    run(stream, [=, this] {
      ops_.check_tokens(targets.raw(), kLeastTarget);
      const BlockWeights<T> block{.weights = as<T>(weights)};
      head_.forward(block[final_norm_], output_rows({0, output}), as<T>(in), targets.raw(), losses);
    });
  }
  void head_train(device::Stream& stream, ConstDeviceBytes weights,
                  std::span<const OutputTile> tiles, ConstDeviceBytes in,
                  DeviceView<const std::int32_t> targets, float gradient_scale, DeviceBytes dx,
                  DeviceView<float> gradient, Accumulation accumulation, const HeadLosses& losses,
                  DeviceBytes kept) override {
    expects(tiles.size() == model_.config.vocabulary_tiles &&
                kept.size() >= memory_.intermediates[model_.head()],
            "head_train: needs all tiles and the memory for one pass");
    std::vector<OutputRows<T>> rows;
    for (const OutputTile& tile : tiles) rows.push_back(output_rows(tile));
    run(stream, [=, this] {
      ops_.check_tokens(targets.raw(), kLeastTarget);
      const BlockWeights<T> block{.weights = as<T>(weights), .gradient = gradient};
      head_.train(block[final_norm_], rows, accumulation, as<T>(in), targets.raw(), gradient_scale,
                  as<T>(dx), losses, kept.raw());
    });
  }
  void head_scan(device::Stream& stream, const OutputTile& tile,
                 DeviceView<const std::int32_t> targets, DeviceBytes rows,
                 const HeadLosses& losses) override {
    run(stream, [=, this] {
      ops_.check_tokens(targets.raw(), kLeastTarget);
      const HeadRows<T> known = head_.rows_at(rows.raw());
      head_.scan(output_rows(tile), targets.raw(), known);
      if (!losses.out.empty()) head_.report_losses(targets.raw(), known, losses);
    });
  }
  void head_differentiate(device::Stream& stream, const OutputTile& tile,
                          DeviceView<const std::int32_t> targets, float gradient_scale,
                          DeviceBytes rows, DeviceView<float> dnormed, Accumulation accumulation,
                          DeviceView<const float> weights) override {
    run(stream, [=, this] {
      HeadRows<T> known = head_.rows_at(rows.raw());
      known.dnormed = dnormed.raw();
      head_.differentiate(output_rows(tile), accumulation, {targets.raw(), weights.raw()},
                          gradient_scale, known);
    });
  }
  void head_end(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes in,
                DeviceView<const std::int32_t> targets, DeviceBytes rows, DeviceView<float> dnormed,
                DeviceBytes dx, DeviceView<float> gradient, DeviceView<double> loss_sum) override {
    run(stream, [=, this] {
      const BlockWeights<T> block{.weights = as<T>(weights), .gradient = gradient};
      HeadRows<T> known = head_.rows_at(rows.raw());
      known.dnormed = dnormed.raw();
      if (!loss_sum.empty()) head_.report_losses(targets.raw(), known, {.out = loss_sum});
      if (!dx.empty()) head_.end(block[final_norm_], as<T>(in), known, as<T>(dx));
    });
  }
  void clear_gradient(device::Stream& stream, std::size_t block,
                      DeviceView<float> gradient) override {
    expects(
        block < cleared_.size() && gradient.size() == model_.blocks[block].own_trained_elements(),
        "clear_gradient: not the accumulators of a block");
    run(stream, [=, this] {
      for (const ElementRange& range : cleared_[block]) {
        ops_.zero(gradient.raw() + range.first, range.count);
      }
    });
  }
  void zero(device::Stream& stream, DeviceView<float> gradient) override {
    run(stream, [=, this] { ops_.zero(gradient.raw(), gradient.size()); });
  }
  void pack_gradient(device::Stream& stream, DeviceView<const float> gradient,
                     DeviceView<const float> tied, DeviceBytes packed,
                     DeviceView<GradientStats> stats) override {
    expects(gradient.size() <= largest_block_ && tied.size() <= gradient.size() &&
                packed.size() == gradient.size() * sizeof(T),
            "pack_gradient: the sizes do not match");
    run(stream, [=, this] {
      ops_.pack(gradient.raw(), tied.raw(), tied.size(), as<T>(packed), gradient.size(),
                reinterpret_cast<GradientStats*>(scratch_), stats.empty() ? nullptr : stats.raw());
    });
  }

  void measure_gradient(device::Stream& stream, ConstDeviceBytes packed, DeviceBytes scratch,
                        DeviceView<GradientStats> stats) override {
    const std::size_t size = packed.size() / sizeof(T);
    expects(scratch.size() >= chunks_of(size) * sizeof(GradientStats),
            "measure_gradient: the scratch memory is too small");
    ops_.measure(stream, as<T>(packed), size, as<GradientStats>(scratch), stats.raw());
  }

  void encode_weights(device::Stream& stream, ConstDeviceBytes weights,
                      DeviceBytes codes) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.encode(stream, as<T>(weights), blocks, as<std::int8_t>(codes),
                reinterpret_cast<float*>(codes.raw() + blocks * WeightCodes::kBlock));
  }
  void decode_weights(device::Stream& stream, ConstDeviceBytes codes,
                      DeviceBytes weights) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.decode(stream, as<std::int8_t>(codes),
                reinterpret_cast<const float*>(codes.raw() + blocks * WeightCodes::kBlock), blocks,
                as<T>(weights));
  }

  void decode_block(device::Stream& stream, std::size_t block, ConstDeviceBytes stored,
                    DeviceBytes weights) override {
    const Bytes plain = model_.blocks.at(block).plain_elements() * sizeof(T);
    const BlockCodes codes(model_, model_.blocks[block]);
    expects(stored.size() >= plain + codes.bytes &&
                weights.size() >= model_.blocks[block].elements * sizeof(T),
            "decode_block: too little memory");
    run(stream, [=, this] {
      ops_.copy_bytes(stored.raw(), weights.raw(), plain);
      for (const BlockCodes::Matrix& matrix : codes.matrices) {
        ops_.decode_base(
            {*model_.quantization, matrix.arrays, stored.raw() + plain + matrix.offset},
            as<T>(weights) + matrix.tensor->offset);
      }
    });
  }

 private:
  /// Negative targets are valid.
  static constexpr std::int32_t kLeastTarget = std::numeric_limits<std::int32_t>::min();

  static std::size_t code_blocks(Bytes weights, Bytes codes) {
    const Elems elements = weights / sizeof(T);
    expects(elements % WeightCodes::kBlock == 0 && codes == WeightCodes::bytes_of(elements),
            "the sizes of weights and codes do not match");
    return elements / WeightCodes::kBlock;
  }
  static std::size_t chunks_of(std::size_t values) {
    return (values + kStatsChunk - 1) / kStatsChunk;
  }

  /// To the training type.
  static float rounded(double value) {
    const auto narrow = static_cast<float>(value);
    if constexpr (kTypeOf<T> == DType::f32) {
      return narrow;
    } else {
      return to_float(from_float<T>(narrow));
    }
  }

  template <class U>
  static U* as(DeviceBytes bytes) {
    return view_as<U>(bytes).raw();
  }
  template <class U>
  static const U* as(ConstDeviceBytes bytes) {
    return view_as<U>(bytes).raw();
  }

  template <class Work>
  void run(device::Stream& stream, Work work) {
    expects(ready_, "set_workspace() must precede the first kernel");
    ops_.run(stream, std::move(work));
  }
  auto exchange_rows(device::Stream& stream, RowExchange& exchange) {
    return ExpertExchange(experts_, model_.config.hidden_size, stream, exchange,
                          [this, &stream](auto work) { this->run(stream, std::move(work)); });
  }
  /// Whether it is a layer, or the first half of one with experts.
  [[nodiscard]] bool is_in_one_piece(std::size_t block) const {
    const BlockSpec& spec = model_.blocks[block];
    return spec.kind == BlockKind::layer &&
           (spec.part == LayerPart::whole || spec.part == LayerPart::attention_half);
  }
  void expect_expert(std::size_t block, DeviceBytes rows) const {
    expects(model_.blocks[block].part == LayerPart::expert, "the block is not an expert");
    expect_rows(rows);
  }
  void expect_layer(std::size_t block, DeviceBytes kept) const {
    expects(is_in_one_piece(block), "the block is not a layer in one piece");
    expects(kept.empty() || kept.size() >= memory_.intermediates[block],
            "the memory for intermediates is smaller than memory().intermediates");
  }
  void expect_layer_tile(std::size_t block) const {
    expects(model_.blocks[block].kind == BlockKind::layer && model_.is_layer_tile(block),
            "the block is not a tile of a layer");
  }
  void expect_rows(DeviceBytes rows) const {
    expects(rows.size() >= memory_.rows, "the memory for rows is smaller than memory().rows");
  }
  /// The norm that the tiles after `block` read.
  [[nodiscard]] NormAt norm_before_tiles(std::size_t block) const {
    if (block == model_.head()) return final_norm_;
    expects(model_.blocks[block].kind == BlockKind::layer, "the block has no norm before tiles");
    return layer_->norm_of(block - model_.first_layer());
  }
  /// The tables of a block of the embedding in its flat values; gradients of frozen ones are null.
  template <class U>
  [[nodiscard]] Embedding<U> tables(std::size_t block, U* values) const {
    const BlockSpec& about = model_.blocks[block];
    const TensorSpec& tokens = about.tensor(model_.outer.tokens);
    const TensorSpec* const positions =
        model_.outer.positions.empty() ? nullptr : about.find(model_.outer.positions);
    const auto at = [values](const TensorSpec* tensor) {
      const bool wanted = tensor != nullptr && (std::is_const_v<U> || !tensor->frozen);
      return wanted ? values + tensor->offset : nullptr;
    };
    return {at(&tokens),      at(positions),        token_scale_,
            tokens.first_row, tokens.shape.front(), model_.config.vocabulary_tiles > 1};
  }
  [[nodiscard]] OutputRows<T> output_rows(const OutputTile& tile) const {
    const bool tied = model_.config.tie_embeddings;
    const BlockSpec& block = model_.blocks[model_.tile(tile.number).block];
    const TensorSpec& matrix = block.tensor(tied ? model_.outer.tokens : model_.outer.output);
    float* const gradient = matrix.frozen ? nullptr : tile.gradient.raw();
    return {tile.number, as<T>(tile.weights) + matrix.offset,
            gradient == nullptr || tied ? gradient : gradient + matrix.offset};
  }

  /// Lays out the workspace from `base` on (null: only counts) and returns its bytes. Layers, the
  /// head, packs and embeddings use the same memory, except for a layer's lasting memory.
  std::size_t lay_out(std::byte* base) {
    Bump shared(base);
    ops_.take_memory(shared);
    layer_->take_lasting_memory(shared);
    const std::size_t before = round_up(shared.used(), kPage);
    std::byte* const rest = base == nullptr ? nullptr : base + before;
    Bump layer(rest);
    layer_->take_memory(layer);
    Bump head(rest);
    tile_sums_.take_memory(head);
    Bump experts = head;
    experts_.take_memory(experts);
    head_.take_memory(head);
    Bump others(rest);
    scratch_ = others.take<std::byte>(std::max<std::size_t>(
        chunks_of(largest_block_) * sizeof(GradientStats), ops_.embedding_scratch_bytes()));
    return round_up(before + std::max({layer.used(), head.used(), experts.used(), others.used()}),
                    kPage);
  }

  Architecture model_;
  MicroBatchShape shape_;
  Ops ops_;
  TileSums<Ops> tile_sums_;
  Head<Ops> head_;
  Experts<Ops> experts_;
  std::unique_ptr<Layer<Ops>> layer_;
  NormAt final_norm_;
  float token_scale_ = 1.0F;  ///< a value of the training type
  std::size_t largest_block_ = 0;
  std::vector<std::vector<ElementRange>> cleared_;  ///< by block, in ascending order
  KernelSizes memory_;
  bool ready_ = false;
  std::byte* scratch_ = nullptr;  ///< for packing and embedding
};

}  // namespace ballast::model
