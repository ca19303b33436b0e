#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/kernels.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {
namespace {

/// Returns the multiplications per token of the recurrence of a delta net: each chunk and head
/// multiplies rows by keys twice, by a state three times, and by updates one and a half times.
std::uint64_t recurrent_products(const DeltaSpec& delta) {
  const std::uint64_t of_head = 2 * kDeltaChunk * delta.key_width +
                                3 * delta.key_width * delta.value_width +
                                3 * kDeltaChunk * delta.value_width / 2;
  return delta.value_heads * of_head;
}

/// One of the tiles of a sublayer.
struct TileOf {
  std::uint64_t tiles = 1;
  std::uint64_t number = 0;
};

/// Adds the tensors of a layer to one of its blocks.
class LayerTensors {
 public:
  /// Without `tile`, sublayers are added whole, with the norms that tiles share.
  LayerTensors(BlockBuilder& block, const LayerSpec& layer, const ModelConfig& config,
               std::uint64_t index, std::optional<TileOf> tile = std::nullopt)
      : block_(block), layer_(layer), config_(config), index_(index), tile_(tile) {}

  void norm(const std::optional<NormSpec>& given, std::uint64_t width) {
    if (given) block_.add_norm(*given, width);
  }
  /// The norm of rows as wide as the residual stream.
  void norm(const std::optional<NormSpec>& given) { norm(given, config_.hidden_size); }

  /// Adds a whole sublayer. `last`: its last map is that of the block.
  void sublayer(const SublayerSpec& sublayer, bool last) {
    norm(sublayer.before);
    body(sublayer.body, last && !sublayer.after);
    norm(sublayer.after);
    if (const auto* const both = std::get_if<MlpWithExpertsSpec>(&sublayer.body)) {
      experts_beside_mlp(both->experts);
    }
  }
  void body(const BodySpec& body, bool last) {
    std::visit([&](const auto& one) { add(one, last); }, body);
  }
  /// Adds the norms inside a sublayer that all of its tiles share.
  void shared_norms(const BodySpec& body) {
    if (const auto* const attention = std::get_if<AttentionSpec>(&body)) head_norms(*attention);
    if (const auto* const delta = std::get_if<DeltaSpec>(&body)) delta_norm(*delta);
  }

  void router(const ExpertsSpec& experts) {
    linear({.name = experts.router}, config_.hidden_size, experts.count);
    if (experts.router_bias) {
      block_.add(experts.router + ".bias", {experts.count}, Init::normal, config_.init_stddev);
    }
    if (experts.correction.empty()) return;
    block_.add_buffer(experts.correction, experts.count);
    if (experts.correction_row) block_.as_row();
  }
  void shared_expert(const ExpertsSpec& experts) {
    if (!experts.shared_gate.empty()) linear({.name = experts.shared_gate}, config_.hidden_size, 1);
    const std::uint64_t wide = experts.shared_width;
    if (experts.shared_in.empty()) return expert_maps(experts, experts.shared_prefix, wide);
    const std::uint64_t rows = 2 * wide / experts.shared_in.size();
    for (const std::string& name : experts.shared_in) {
      linear({.name = experts.shared_prefix + name}, config_.hidden_size, rows);
    }
    block_.add_last_product(experts.shared_prefix + experts.shared_out + ".weight",
                            {config_.hidden_size, wide}, config_.init_stddev);
  }
  void expert(const ExpertsSpec& experts, std::uint64_t number) {
    if (experts.fused) return fused_maps(experts, number);
    if (experts.stacked) return stacked_maps(experts, number);
    expert_maps(experts, experts.of_expert(number, ""), experts.width);
  }
  /// Adds the columns of the table that the layer reads.
  void table(const LayerEmbeddingSpec& inputs) {
    block_.add(inputs.table + ".weight", {inputs.vocabulary, inputs.width}, Init::normal,
               config_.init_stddev);
    block_.table().without_prefix().columns_of(config_.num_layers * inputs.width,
                                               index_ * inputs.width);
  }

 private:
  void add(const AttentionSpec& attention, bool last) {
    std::visit([&](const auto& maps) { head_inputs(attention, maps); }, attention.maps);
    if (!attention.sinks.empty()) {
      block_.add(attention.sinks, {attention.heads.heads}, Init::normal, config_.init_stddev);
    }
    if (!tile_) head_norms(attention);
    block_.attend(attention.queries() / tiles(), attention.window);
    const std::uint64_t results = attention.heads.heads * attention.value_width();
    last_map(attention.out, results, share(0, results), last);
  }
  void add(const DeltaSpec& delta, bool last) {
    const std::uint64_t h = config_.hidden_size;
    const std::uint64_t values = delta.values();
    const std::uint64_t heads = delta.value_heads;
    const std::vector<TileRange> channels = shares({delta.keys(), delta.keys(), values});
    if (delta.by_key_head) {
      outputs(delta.maps.at(0), h, {share(0, delta.channels() + values)},
              delta.channels() + values);
      outputs(delta.maps.at(1), h, {share(0, 2 * heads)}, 2 * heads);
    } else {
      std::vector<std::uint64_t> apart = {delta.keys(), delta.keys(), values, values, heads, heads};
      if (delta.maps.size() == 4) {
        outputs(delta.maps.front(), h, channels, delta.channels());
        apart.erase(apart.begin(), apart.begin() + 2);
      }
      for (std::size_t i = delta.maps.size() == 4 ? 1 : 0; i < delta.maps.size(); ++i) {
        outputs(delta.maps[i], h, {share(0, apart.at(i))}, apart.at(i));
      }
    }
    if (delta.convolution.size() == 1) {
      taps(delta, delta.convolution.front(), channels, delta.channels());
    } else {
      const std::vector<std::uint64_t> widths = {delta.keys(), delta.keys(), values};
      for (std::size_t i = 0; i < widths.size(); ++i) {
        taps(delta, delta.convolution.at(i), {share(0, widths[i])}, widths[i]);
      }
    }
    const TileRange own = share(0, heads);
    block_.add(delta.shift, {own.size}, Init::ones).rows_of(heads, own.first);
    block_.add(delta.decay, {own.size}, Init::log_uniform, 16.0).rows_of(heads, own.first);
    if (!tile_) delta_norm(delta);
    block_.recur(values / tiles(), recurrent_products(delta) / tiles());
    last_map(delta.out, values, share(0, values), last);
  }
  void add(const ConvolutionSpec& convolution, bool last) {
    const std::uint64_t channels = convolution.channels;
    const TileRange own = share(0, channels);
    outputs(convolution.in, config_.hidden_size, shares({channels, channels, channels}),
            3 * channels);
    block_.add(convolution.convolution + ".weight", {own.size, 1, convolution.taps}, Init::uniform,
               1.0 / std::sqrt(static_cast<double>(convolution.taps)));
    block_.rows_of(channels, own.first);
    if (convolution.bias) {
      block_.add(convolution.convolution + ".bias", {own.size}, Init::zeros);
      block_.rows_of(channels, own.first);
    }
    // Counts like attention to the tokens that it reads.
    block_.attend(own.size, convolution.taps);
    last_map(convolution.out, channels, own, last);
  }
  void taps(const DeltaSpec& delta, const std::string& name, const std::vector<TileRange>& ranges,
            std::uint64_t channels) {
    for (const TileRange& range : ranges) {
      block_.add(name + ".weight", {range.size, 1, delta.taps}, Init::uniform,
                 1.0 / std::sqrt(static_cast<double>(delta.taps)));
      block_.rows_of(channels, range.first);
    }
  }
  void add(const MlpSpec& mlp, bool last) {
    const std::uint64_t wide = mlp.width;
    const TileRange own =
        tile_ ? tile_range(wide, tile_->tiles, tile_->number) : TileRange{0, wide};
    if (mlp.gated && mlp.in.size() == 1) {
      std::vector<TileRange> both = {own, {wide + own.first, own.size}};
      if (!tile_) both = {{0, 2 * wide}};
      outputs(mlp.in.front(), config_.hidden_size, both, 2 * wide);
    } else {
      for (const MapSpec& map : mlp.in) outputs(map, config_.hidden_size, {own}, wide);
    }
    last_map(mlp.out, wide, own, last);
  }
  void add(const MlpWithExpertsSpec& both, bool last) { add(both.mlp, last); }
  void add(const LayerEmbeddingSpec& inputs, bool /*last*/) {
    const std::uint64_t h = config_.hidden_size;
    if (index_ == 0) {
      linear({.name = inputs.projection}, h, config_.num_layers * inputs.width);
      block_.without_prefix().repeated();
      norm(NormSpec{.name = inputs.projection_norm}, inputs.width);
      block_.without_prefix();
    }
    linear({.name = inputs.gate}, h, inputs.width);
    block_.repeated();
    linear({.name = inputs.out}, inputs.width, h);
    block_.repeated();
  }
  void add(const ExpertsSpec& /*experts*/, bool /*last*/) {
    expects(false, "experts have their own blocks");
  }

  void head_inputs(const AttentionSpec& attention, const HeadMaps& maps) {
    const std::uint64_t h = config_.hidden_size;
    const std::uint64_t q = attention.queries();
    const std::uint64_t kv = attention.keys();
    const std::uint64_t heads = attention.heads.heads / tiles();
    if (maps.maps.size() == 1 && !attention.keys_of) {
      const std::vector<TileRange> parts =
          maps.interleaved ? std::vector{share(0, q + 2 * kv)} : shares({q, kv, kv});
      outputs(maps.maps.front(), h, parts, q + 2 * kv);
      if (maps.interleaved) block_.stored_by({3, heads});
      return;
    }
    const std::uint64_t own = maps.output_gate ? 2 * q : q;
    outputs(maps.maps.at(0), h, {share(0, own)}, own);
    if (maps.output_gate) block_.stored_by({2, heads});
    if (!maps.gate.name.empty()) outputs(maps.gate, h, {share(0, q)}, q);
    for (std::size_t i = 1; i < maps.maps.size(); ++i) {
      outputs(maps.maps.at(i), h, {share(0, kv)}, kv);
    }
  }
  void head_inputs(const AttentionSpec& attention, const LatentMaps& latent) {
    const std::uint64_t h = config_.hidden_size;
    if (latent.query_rank > 0) {
      linear(latent.query_down, h, latent.query_rank);
      norm(latent.query_norm, latent.query_rank);
    }
    linear(latent.query, latent.query_rank > 0 ? latent.query_rank : h, attention.queries());
    linear(latent.down, h, latent.rank + latent.rotating);
    norm(latent.norm, latent.rank);
    linear(latent.up, latent.rank, attention.heads.heads * (latent.plain + latent.values));
  }
  void head_norms(const AttentionSpec& attention) {
    const auto* const maps = std::get_if<HeadMaps>(&attention.maps);
    if (maps == nullptr) return;
    const auto width = [&](std::uint64_t heads) {
      return (maps->whole_rows ? heads : 1) * attention.heads.head_dim;
    };
    norm(maps->query_norm, width(attention.heads.heads));
    norm(maps->key_norm, width(attention.heads.kv_heads));
  }
  void delta_norm(const DeltaSpec& delta) { norm(delta.norm, delta.value_width); }
  void experts_beside_mlp(const LayerExpertsSpec& experts) {
    const std::uint64_t h = config_.hidden_size;
    const std::uint64_t wide = experts.width;
    const double stddev = config_.init_stddev;
    norm(NormSpec{.name = experts.norm_after_mlp}, h);
    linear({.name = experts.router}, h, experts.count);
    block_.add(experts.router_scale, {h}, Init::ones);
    block_.add(experts.factors, {experts.count}, Init::ones);
    norm(NormSpec{.name = experts.norm_before}, h);
    block_.add(experts.in, {experts.count, 2 * wide, h}, Init::normal, stddev);
    block_.add(experts.out, {experts.count, h, wide}, Init::normal, stddev);
    block_.add_repeated_products(experts.per_token * 3 * wide * h);
    norm(NormSpec{.name = experts.norm_after}, h);
  }

  void expert_maps(const ExpertsSpec& experts, const std::string& before, std::uint64_t width) {
    const std::uint64_t h = config_.hidden_size;
    linear({.name = before + experts.gate}, h, width);
    linear({.name = before + experts.up}, h, width);
    block_.add_last_product(before + experts.down + ".weight", {h, width}, config_.init_stddev);
  }
  void fused_maps(const ExpertsSpec& experts, std::uint64_t number) {
    const std::uint64_t h = config_.hidden_size;
    block_.add(experts.prefix + kFusedGate, {2 * experts.width, h}, Init::normal,
               config_.init_stddev);
    block_.stored_by({.stacked = experts.count}, number);
    block_.add_last_product(experts.prefix + experts.down, {h, experts.width}, config_.init_stddev);
    block_.stored_by({.stacked = experts.count}, number);
  }
  void stacked_maps(const ExpertsSpec& experts, std::uint64_t number) {
    const std::uint64_t h = config_.hidden_size;
    const std::uint64_t wide = experts.width;
    const auto biased = [&](const std::string& name, std::uint64_t out, const StoredRows& rows) {
      block_.add(experts.prefix + name + "_bias", {out}, Init::zeros);
      block_.stored_by(rows, number);
    };
    block_.add(experts.prefix + experts.gate, {2 * wide, h}, Init::normal, config_.init_stddev);
    biased(experts.gate, 2 * wide,
           {.parts = 2, .groups = wide, .as_columns = true, .stacked = experts.count});
    block_.add_last_product(experts.prefix + experts.down, {h, wide}, config_.init_stddev);
    biased(experts.down, h, {.as_columns = true, .stacked = experts.count});
  }

  /// Adds a whole map [out, in] that is not the block's last.
  void linear(const MapSpec& map, std::uint64_t in, std::uint64_t out) {
    outputs(map, in, {{0, out}}, out);
  }
  /// Adds some outputs of a map [out, in], one tensor per range: rows of its matrix, or columns of
  /// a transposed one.
  void outputs(const MapSpec& map, std::uint64_t in, const std::vector<TileRange>& ranges,
               std::uint64_t out) {
    for (const TileRange& range : ranges) {
      block_.add(map.name + ".weight", shape(in, range.size), Init::normal, stddev_of(map));
      if (layer_.input_first) {
        block_.columns_of(out, range.first);
      } else {
        block_.rows_of(out, range.first);
      }
    }
    if (!map.bias) return;
    for (const TileRange& range : ranges) {
      block_.add(map.name + ".bias", {range.size}, Init::zeros).rows_of(out, range.first);
    }
  }
  /// Adds the inputs `range` of the last map [H, in] of a sublayer: columns of its matrix, or rows
  /// of a transposed one. The bias belongs to the first tile. `last`: the backward pass does not
  /// need the product.
  void last_map(const MapSpec& map, std::uint64_t in, const TileRange& range, bool last) {
    const std::string name = map.name + ".weight";
    std::vector<std::uint64_t> extents = shape(range.size, config_.hidden_size);
    if (last) {
      block_.add_last_product(name, std::move(extents), stddev_of(map));
    } else {
      block_.add(name, std::move(extents), Init::normal, stddev_of(map));
    }
    if (layer_.input_first) {
      block_.rows_of(in, range.first);
    } else {
      block_.columns_of(in, range.first);
    }
    if (!map.bias || range.first > 0) return;
    block_.add(map.name + ".bias", {config_.hidden_size}, Init::zeros);
  }

  [[nodiscard]] std::uint64_t tiles() const { return tile_ ? tile_->tiles : 1; }
  /// Returns the tile's part of `all` rows that `before` others precede.
  [[nodiscard]] TileRange share(std::uint64_t before, std::uint64_t all) const {
    const std::uint64_t own = all / tiles();
    return {before + (tile_ ? tile_->number * own : 0), own};
  }
  /// Returns the tile's parts of rows in consecutive groups, or all rows as one range.
  [[nodiscard]] std::vector<TileRange> shares(const std::array<std::uint64_t, 3>& groups) const {
    if (!tile_) return {{0, groups[0] + groups[1] + groups[2]}};
    return {share(0, groups[0]), share(groups[0], groups[1]),
            share(groups[0] + groups[1], groups[2])};
  }
  [[nodiscard]] std::vector<std::uint64_t> shape(std::uint64_t in, std::uint64_t out) const {
    if (layer_.input_first) return {in, out};
    return {out, in};
  }
  [[nodiscard]] double stddev_of(const MapSpec& map) const {
    return map.init_factor * config_.init_stddev;
  }

  BlockBuilder& block_;
  const LayerSpec& layer_;
  const ModelConfig& config_;
  std::uint64_t index_;
  std::optional<TileOf> tile_;
};

/// Makes the blocks of a layer one after the other.
class LayerBlocks {
 public:
  LayerBlocks(const LayerSpec& layer, const ModelConfig& config, std::uint64_t index)
      : layer_(layer), config_(config), index_(index) {}

  void whole() {
    add("", BlockContent::whole, [&](LayerTensors& tensors, BlockBuilder& block) {
      sublayers(tensors, layer_.sublayers);
      if (!layer_.result_scale.empty()) block.add_buffer(layer_.result_scale, 1, Init::ones);
    });
  }
  void in_tiles() {
    for (const SublayerSpec& sublayer : layer_.sublayers) {
      const bool mlp = std::holds_alternative<MlpSpec>(sublayer.body);
      const std::string name = mlp ? "mlp" : "attention";
      add(name, BlockContent::norm, [&](LayerTensors& tensors, BlockBuilder&) {
        tensors.norm(sublayer.before);
        tensors.shared_norms(sublayer.body);
      });
      const std::uint64_t tiles = tiles_of(sublayer.body, config_.layer_tiles);
      for (std::uint64_t t = 0; t < tiles; ++t) {
        add(
            fmt::format("{} {}", name, t), mlp ? BlockContent::mlp : BlockContent::attention,
            [&](LayerTensors& tensors, BlockBuilder&) { tensors.body(sublayer.body, true); },
            TileOf{tiles, t});
      }
    }
  }
  void with_experts(const ExpertsSpec& experts) {
    const SublayerSpec& routed = layer_.sublayers.back();
    const bool own_norm = routed.before && routed.reads == Reads::stream;
    const bool shared_norm = !routed.before && !routed.after && routed.reads == Reads::same_norm;
    expects(std::holds_alternative<ExpertsSpec>(routed.body) && (own_norm || shared_norm) &&
                routed.factor == 1.0 && !layer_.input_first,
            "experts must be the last sublayer, with a norm before them or that of attention");
    const std::span<const SublayerSpec> before(layer_.sublayers.data(),
                                               layer_.sublayers.size() - 1);
    if (!before.empty()) {
      add("attention", BlockContent::attention_half,
          [&](LayerTensors& tensors, BlockBuilder&) { sublayers(tensors, before); });
    }
    add("router", BlockContent::router, [&](LayerTensors& tensors, BlockBuilder&) {
      tensors.norm(routed.before);
      tensors.router(experts);
    });
    if (experts.shared_width > 0) {
      add("shared expert", BlockContent::shared_expert,
          [&](LayerTensors& tensors, BlockBuilder&) { tensors.shared_expert(experts); });
    }
    const double share =
        static_cast<double>(experts.per_token) / static_cast<double>(experts.count);
    for (std::uint64_t e = 0; e < experts.count; ++e) {
      add(fmt::format("expert {}", e), BlockContent::expert,
          [&](LayerTensors& tensors, BlockBuilder& block) {
            block.expert(e, share);
            tensors.expert(experts, e);
          });
    }
    if (!routed.after) return;
    add("result norm", BlockContent::result_norm,
        [&](LayerTensors& tensors, BlockBuilder&) { tensors.norm(routed.after); });
  }
  void table(const LayerEmbeddingSpec& inputs) {
    add("table", BlockContent::layer_embedding,
        [&](LayerTensors& tensors, BlockBuilder&) { tensors.table(inputs); });
  }
  std::vector<BlockSpec> take() { return std::move(blocks_); }

 private:
  template <class Fill>
  void add(const std::string& name, BlockContent content, const Fill& fill,
           std::optional<TileOf> tile = std::nullopt) {
    const std::string full = fmt::format("layer {}{}{}", index_, name.empty() ? "" : " ", name);
    BlockBuilder block(BlockKind::layer, full, layer_.prefix);
    block.content(content);
    LayerTensors tensors(block, layer_, config_, index_, tile);
    fill(tensors, block);
    blocks_.push_back(block.finish());
  }
  static void sublayers(LayerTensors& tensors, std::span<const SublayerSpec> all) {
    for (const SublayerSpec& one : all) tensors.sublayer(one, &one == &all.back());
  }

  const LayerSpec& layer_;
  const ModelConfig& config_;
  std::uint64_t index_;
  std::vector<BlockSpec> blocks_;
};

}  // namespace

std::vector<BlockSpec> blocks_of(const LayerSpec& layer, const ModelConfig& config,
                                 std::uint64_t index) {
  LayerBlocks blocks(layer, config, index);
  if (const auto* const experts = layer.find<ExpertsSpec>()) {
    blocks.with_experts(*experts);
  } else if (config.layer_tiles > 1) {
    blocks.in_tiles();
  } else {
    blocks.whole();
  }
  if (const auto* const inputs = layer.find<LayerEmbeddingSpec>()) blocks.table(*inputs);
  return blocks.take();
}

std::size_t count_blocks(const LayerSpec& layer, const ModelConfig& config,
                         const RankSplit& split) {
  if (const auto* const experts = layer.find<ExpertsSpec>()) {
    const std::size_t before = layer.sublayers.size() > 1 ? 1 : 0;
    const std::size_t shared = experts->shared_width > 0 ? 1 : 0;
    const std::size_t after = layer.sublayers.back().after ? 1 : 0;
    return before + 1 + shared + experts->count / split.experts + after;
  }
  if (config.layer_tiles == 1) return layer.find<LayerEmbeddingSpec>() == nullptr ? 1 : 2;
  std::size_t count = 0;
  for (const SublayerSpec& sublayer : layer.sublayers) {
    count += 1 + tiles_of(sublayer.body, config.layer_tiles) / split.tensor;
  }
  return count;
}

}  // namespace ballast::model
