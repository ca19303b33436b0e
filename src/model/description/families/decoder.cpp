#include "src/model/description/families/decoder.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/kernels.h"

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

/// Adds the tensors described by a DecoderSpec to a block.
class Tensors {
 public:
  /// `heads`: those of the layer.
  Tensors(BlockBuilder& block, const DecoderSpec& spec, const HeadExtents& heads, double stddev)
      : block_(block), spec_(spec), heads_(heads), stddev_(stddev) {}

  void norm(const std::string& name, std::uint64_t width, bool biased) {
    if (name.empty()) return;
    const bool shifted = spec_.norm_offset != 0.0F;
    block_.add(name + ".weight", {width}, shifted ? Init::zeros : Init::ones);
    if (biased) block_.add(name + ".bias", {width}, Init::zeros);
  }
  void linear(const std::string& name, std::uint64_t in, std::uint64_t out, bool biased,
              double factor = 1.0) {
    block_.add(name + ".weight", shape(in, out), Init::normal, factor * stddev_);
    bias(name, out, biased);
  }
  /// Adds some outputs of a map [out, in], one tensor per range: rows of its matrix, or columns of
  /// a Conv1D.
  void outputs(const std::string& name, std::uint64_t in, std::uint64_t out,
               const std::vector<TileRange>& ranges, bool biased) {
    for (const TileRange& range : ranges) {
      block_.add(name + ".weight", shape(in, range.size), Init::normal, stddev_);
      if (spec_.conv1d) {
        block_.columns_of(out, range.first);
      } else {
        block_.rows_of(out, range.first);
      }
    }
    if (!biased) return;
    for (const TileRange& range : ranges) {
      block_.add(name + ".bias", {range.size}, Init::zeros);
      block_.rows_of(out, range.first);
    }
  }
  /// Adds some inputs of a tile's last map [out, in]: columns of its matrix, or rows of a Conv1D.
  /// The bias belongs to the first tile.
  void last_inputs(const std::string& name, std::uint64_t in, std::uint64_t out,
                   const TileRange& range, bool biased) {
    block_.add_last_product(name + ".weight", shape(range.size, out),
                            spec_.residual_factor * stddev_);
    if (spec_.conv1d) {
      block_.rows_of(in, range.first);
    } else {
      block_.columns_of(in, range.first);
    }
    bias(name, out, biased && range.first == 0);
  }
  /// Adds the queries, keys and values of tile `number` of `tiles`, each with equally many heads.
  void attention_tile(const ModelConfig& c, std::uint64_t tiles, std::uint64_t number) {
    const std::uint64_t h = c.hidden_size;
    const std::uint64_t q = c.num_heads * c.head_dim;
    const std::uint64_t kv = c.num_kv_heads * c.head_dim;
    const auto part = [&](std::uint64_t before, std::uint64_t all) {
      return TileRange{before + number * (all / tiles), all / tiles};
    };
    if (spec_.delta.key_heads > 0) return delta_tile(h, tiles, part);
    if (spec_.interleaved_qkv) {
      outputs(spec_.qkv.front(), h, 3 * q, {part(0, 3 * q)}, spec_.qkv_bias);
      block_.stored_by({3, c.num_heads / tiles});
    } else if (spec_.qkv.size() == 1) {
      outputs(spec_.qkv.front(), h, q + 2 * kv, {part(0, q), part(q, kv), part(q + kv, kv)},
              spec_.qkv_bias);
    } else {
      const std::uint64_t own = spec_.output_gate ? 2 * q : q;
      outputs(spec_.qkv.at(0), h, own, {part(0, own)}, spec_.qkv_bias);
      if (spec_.output_gate) block_.stored_by({2, c.num_heads / tiles});
      outputs(spec_.qkv.at(1), h, kv, {part(0, kv)}, spec_.qkv_bias);
      outputs(spec_.qkv.at(2), h, kv, {part(0, kv)}, spec_.qkv_bias);
    }
    block_.attend(q / tiles, spec_.window);
    last_inputs(spec_.attention_out, q, h, part(0, q), spec_.attention_out_bias);
  }
  /// Adds rows `range` of gate and up, or of the only first map, and their inputs of the last map.
  void mlp_tile(const ModelConfig& c, const TileRange& range) {
    const std::uint64_t h = c.hidden_size;
    const std::uint64_t wide = c.intermediate_size;
    if (spec_.gated && spec_.mlp_in.size() == 1) {
      outputs(spec_.mlp_in.front(), h, 2 * wide, {range, {wide + range.first, range.size}},
              spec_.mlp_bias);
    } else {
      for (const std::string& name : spec_.mlp_in) outputs(name, h, wide, {range}, spec_.mlp_bias);
    }
    last_inputs(spec_.mlp_out, wide, h, range, spec_.mlp_bias);
  }
  /// Adds the map of the block's last product.
  void last_linear(const std::string& name, std::uint64_t in, std::uint64_t out, bool biased) {
    block_.add_last_product(name + ".weight", shape(in, out), spec_.residual_factor * stddev_);
    bias(name, out, biased);
  }
  /// Adds the maps of one expert of ExpertsSpec::fused.
  void fused_maps(const ExpertsSpec& experts, std::uint64_t number, std::uint64_t h) {
    block_.add(experts.prefix + kFusedGate, {2 * experts.width, h}, Init::normal, stddev_);
    block_.stored_by({.stacked = experts.count}, number);
    block_.add_last_product(experts.prefix + experts.down, {h, experts.width},
                            spec_.residual_factor * stddev_);
    block_.stored_by({.stacked = experts.count}, number);
  }
  /// Adds the maps of one expert of ExpertsSpec::stacked.
  void stacked_maps(const ExpertsSpec& experts, std::uint64_t number, std::uint64_t h) {
    const std::uint64_t wide = experts.width;
    const auto biased = [&](const std::string& name, std::uint64_t out, const StoredRows& rows) {
      block_.add(experts.prefix + name + "_bias", {out}, Init::zeros);
      block_.stored_by(rows, number);
    };
    block_.add(experts.prefix + experts.gate, {2 * wide, h}, Init::normal, stddev_);
    biased(experts.gate, 2 * wide,
           {.parts = 2, .groups = wide, .as_columns = true, .stacked = experts.count});
    block_.add_last_product(experts.prefix + experts.down, {h, wide},
                            spec_.residual_factor * stddev_);
    biased(experts.down, h, {.as_columns = true, .stacked = experts.count});
  }
  /// Adds the tensors of LayerExpertsSpec.
  void layer_experts(std::uint64_t h) {
    const LayerExpertsSpec& experts = spec_.layer_experts;
    if (experts.count == 0) return;
    const std::uint64_t wide = experts.width;
    norm(experts.norm_after_mlp, h, false);
    block_.add(experts.router + ".weight", {experts.count, h}, Init::normal, stddev_);
    block_.add(experts.router_scale, {h}, Init::ones);
    block_.add(experts.factors, {experts.count}, Init::ones);
    norm(experts.norm_before, h, false);
    block_.add(experts.in, {experts.count, 2 * wide, h}, Init::normal, stddev_);
    block_.add(experts.out, {experts.count, h, wide}, Init::normal, stddev_);
    block_.add_repeated_products(experts.per_token * 3 * wide * h);
    norm(experts.norm_after, h, false);
  }
  /// Adds the tensors of LayerEmbeddingSpec of layer `index`, except its table.
  void layer_inputs(const ModelConfig& c, std::uint64_t index) {
    const LayerEmbeddingSpec& inputs = spec_.inputs;
    if (inputs.width == 0) return;
    const std::uint64_t h = c.hidden_size;
    const std::uint64_t all = c.num_layers * inputs.width;
    if (index == 0) {
      linear(inputs.projection, h, all, false);
      block_.without_prefix().repeated();
      norm(inputs.projection_norm, inputs.width, false);
      block_.without_prefix();
    }
    linear(inputs.gate, h, inputs.width, false);
    block_.repeated();
    linear(inputs.out, inputs.width, h, false, spec_.residual_factor);
    block_.repeated();
    norm(inputs.norm, h, false);
  }
  /// Adds the columns of the table of LayerEmbeddingSpec that layer `index` reads.
  void table(const ModelConfig& c, std::uint64_t index) {
    const LayerEmbeddingSpec& inputs = spec_.inputs;
    block_.add(inputs.table + ".weight", {inputs.vocabulary, inputs.width}, Init::normal, stddev_);
    block_.table().without_prefix().columns_of(c.num_layers * inputs.width, index * inputs.width);
    block_.content(BlockContent::layer_embedding);
  }
  /// Adds queries, keys and values with their norms, and the norm before them.
  void attention_inputs(const ModelConfig& c) {
    const std::uint64_t h = c.hidden_size;
    const std::uint64_t q = heads_.heads * heads_.head_dim;
    const std::uint64_t kv = heads_.kv_heads * heads_.head_dim;
    norm(spec_.norm_before_attention, h, spec_.layer_norm);
    if (spec_.delta.key_heads > 0) return delta_inputs(h);
    if (spec_.latent.rank > 0) {
      latent_inputs(c);
    } else if (spec_.qkv.size() == 1 && !spec_.reads_keys) {
      linear(spec_.qkv.front(), h, q + 2 * kv, spec_.qkv_bias);
      if (spec_.interleaved_qkv) block_.stored_by({3, c.num_heads});
    } else {
      linear(spec_.qkv.at(0), h, spec_.output_gate ? 2 * q : q, spec_.qkv_bias);
      if (spec_.output_gate) block_.stored_by({2, heads_.heads});
      for (std::size_t i = 1; i < spec_.qkv.size(); ++i) {
        linear(spec_.qkv.at(i), h, kv, spec_.qkv_bias);
      }
    }
    if (!spec_.sinks.empty()) block_.add(spec_.sinks, {c.num_heads}, Init::normal, stddev_);
    head_norms();
    block_.attend(q, spec_.window);
  }
  void head_norms() {
    const auto width = [&](std::uint64_t heads) {
      return (spec_.norms_whole_rows ? heads : 1) * heads_.head_dim;
    };
    norm(spec_.query_norm, width(heads_.heads), false);
    norm(spec_.key_norm, width(heads_.kv_heads), false);
  }
  /// Adds the norm that all heads of a gated delta net share.
  void delta_norm() {
    const DeltaSpec& delta = spec_.delta;
    if (delta.key_heads == 0) return;
    block_.add(delta.norm + ".weight", {delta.value_width}, Init::ones);
  }

 private:
  /// Adds the maps of a gated delta net's inputs, and its own tensors.
  void delta_inputs(std::uint64_t h) {
    const DeltaSpec& delta = spec_.delta;
    std::vector<std::uint64_t> outputs = {delta.channels(), delta.values(), delta.value_heads,
                                          delta.value_heads};
    if (delta.by_key_head) outputs = {delta.channels() + delta.values(), 2 * delta.value_heads};
    for (std::size_t i = 0; i < outputs.size(); ++i) linear(spec_.qkv.at(i), h, outputs[i], false);
    delta_weights({{0, delta.channels()}}, {0, delta.value_heads});
    delta_norm();
    block_.recur(delta.values(), recurrent_products(delta));
  }
  /// Adds the convolution of some channels, one tensor per range, and the weights of some heads of
  /// values.
  void delta_weights(const std::vector<TileRange>& channels, const TileRange& heads) {
    const DeltaSpec& delta = spec_.delta;
    for (const TileRange& range : channels) {
      block_.add(delta.convolution + ".weight", {range.size, 1, delta.taps}, Init::uniform,
                 1.0 / std::sqrt(static_cast<double>(delta.taps)));
      block_.rows_of(delta.channels(), range.first);
    }
    block_.add(delta.shift, {heads.size}, Init::ones);
    block_.rows_of(delta.value_heads, heads.first);
    block_.add(delta.decay, {heads.size}, Init::log_uniform, 16.0);
    block_.rows_of(delta.value_heads, heads.first);
  }
  /// Adds one of `tiles` tiles of a gated delta net, without its norm. part(before, all): its range
  /// of `all` rows that `before` others precede.
  template <class Part>
  void delta_tile(std::uint64_t h, std::uint64_t tiles, const Part& part) {
    const DeltaSpec& delta = spec_.delta;
    const std::uint64_t keys = delta.keys();
    const std::uint64_t values = delta.values();
    const std::uint64_t all = delta.channels();
    const std::uint64_t heads = delta.value_heads;
    const std::vector<TileRange> channels = {part(0, keys), part(keys, keys),
                                             part(2 * keys, values)};
    if (delta.by_key_head) {
      outputs(spec_.qkv.at(0), h, all + values, {part(0, all + values)}, false);
      outputs(spec_.qkv.at(1), h, 2 * heads, {part(0, 2 * heads)}, false);
    } else {
      outputs(spec_.qkv.at(0), h, all, channels, false);
      outputs(spec_.qkv.at(1), h, values, {part(0, values)}, false);
      for (std::size_t i : {2, 3}) outputs(spec_.qkv.at(i), h, heads, {part(0, heads)}, false);
    }
    delta_weights(channels, part(0, heads));
    block_.recur(values / tiles, recurrent_products(delta) / tiles);
    last_inputs(spec_.attention_out, values, h, part(0, values), spec_.attention_out_bias);
  }
  void latent_inputs(const ModelConfig& c) {
    const LatentSpec& latent = spec_.latent;
    const std::uint64_t h = c.hidden_size;
    const std::uint64_t q = c.num_heads * c.head_dim;
    if (latent.query_rank > 0) {
      linear(latent.query_down, h, latent.query_rank, latent.bias);
      norm(latent.query_norm, latent.query_rank, false);
    }
    linear(spec_.qkv.front(), latent.query_rank > 0 ? latent.query_rank : h, q, spec_.qkv_bias);
    linear(latent.down, h, latent.rank + latent.rotating, latent.bias);
    norm(latent.norm, latent.rank, false);
    linear(latent.up, latent.rank, c.num_heads * (latent.plain + latent.values), false);
  }
  [[nodiscard]] std::vector<std::uint64_t> shape(std::uint64_t in, std::uint64_t out) const {
    if (spec_.conv1d) return {in, out};
    return {out, in};
  }
  void bias(const std::string& name, std::uint64_t out, bool biased) {
    if (biased) block_.add(name + ".bias", {out}, Init::zeros);
  }

  BlockBuilder& block_;
  const DecoderSpec& spec_;
  HeadExtents heads_;
  double stddev_;
};

/// Number of inputs of the map after attention.
std::uint64_t attention_width(const HeadExtents& heads, const DecoderSpec& spec) {
  if (spec.delta.key_heads > 0) return spec.delta.values();
  return heads.heads * (spec.latent.rank > 0 ? spec.latent.values : heads.head_dim);
}

}  // namespace

void set_standards(std::vector<CheckpointKey>& keys,
                   const std::vector<CheckpointStandard>& standards) {
  for (const CheckpointStandard& standard : standards) {
    for (CheckpointKey& key : keys) {
      if (key.name != standard.name) continue;
      key.standard = standard.value;
      key.nullable = standard.nullable;
    }
  }
}

CheckpointKey checkpoint_key(const DetailKey& detail) {
  return {detail.name, detail.name, {}, detail.standard, detail.standard.is_null()};
}

BlockSpec DecoderFamily::layer(const ModelConfig& c, std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  const std::uint64_t h = c.hidden_size;
  const std::uint64_t wide = spec.mlp_width > 0 ? spec.mlp_width : c.intermediate_size;
  BlockBuilder block(BlockKind::layer, fmt::format("layer {}", index), prefix(index));
  const HeadExtents extents = heads(c, index);
  Tensors tensors(block, spec, extents, c.init_stddev);

  tensors.attention_inputs(c);
  tensors.linear(spec.attention_out, attention_width(extents, spec), h, spec.attention_out_bias,
                 spec.residual_factor);
  tensors.norm(spec.norm_after_attention, h, spec.layer_norm);
  tensors.norm(spec.norm_before_mlp, h, spec.layer_norm);
  const std::uint64_t in_width = spec.gated && spec.mlp_in.size() == 1 ? 2 * wide : wide;
  for (const std::string& name : spec.mlp_in) tensors.linear(name, h, in_width, spec.mlp_bias);
  if (spec.norm_after_mlp.empty()) {
    tensors.last_linear(spec.mlp_out, wide, h, spec.mlp_bias);
  } else {
    tensors.linear(spec.mlp_out, wide, h, spec.mlp_bias, spec.residual_factor);
  }
  tensors.norm(spec.norm_after_mlp, h, spec.layer_norm);
  tensors.layer_experts(h);
  tensors.layer_inputs(c, index);
  if (!spec.result_scale.empty()) block.add_buffer(spec.result_scale, 1, Init::ones);
  return block.finish();
}

std::vector<BlockSpec> DecoderFamily::blocks_of_layer(const ModelConfig& c,
                                                      std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  if (spec.experts.count > 0) return expert_blocks(c, index, spec);
  std::vector<BlockSpec> blocks = Family::blocks_of_layer(c, index);
  if (spec.inputs.width == 0) return blocks;
  BlockBuilder table(BlockKind::layer, fmt::format("layer {} table", index), prefix(index));
  Tensors(table, spec, heads(c, index), c.init_stddev).table(c, index);
  blocks.push_back(table.finish());
  return blocks;
}

std::size_t DecoderFamily::count_blocks_of_layer(const ModelConfig& c, std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  const std::uint64_t experts = spec.experts.count;
  const std::uint64_t shared = spec.experts.shared_width > 0 ? 1 : 0;
  const std::uint64_t tables = spec.inputs.width > 0 ? 1 : 0;
  return experts == 0 ? Family::count_blocks_of_layer(c, index) + tables : 2 + shared + experts;
}

std::uint64_t DecoderFamily::experts_of_layer(const ModelConfig& c, std::uint64_t index) const {
  return decoder(c, index).experts.count;
}

std::vector<BlockSpec> DecoderFamily::expert_blocks(const ModelConfig& c, std::uint64_t index,
                                                    const DecoderSpec& spec) const {
  expects(!spec.norm_before_mlp.empty() && spec.norm_after_attention.empty() &&
              spec.norm_after_mlp.empty() && !spec.parallel && spec.gated && !spec.conv1d,
          "a layer with experts needs a norm before them, and none after attention or them");
  const std::uint64_t h = c.hidden_size;
  const ExpertsSpec& experts = spec.experts;
  const HeadExtents extents = heads(c, index);
  std::vector<BlockSpec> blocks;
  const auto add = [&](const std::string& name, const auto& fill) {
    BlockBuilder block(BlockKind::layer, fmt::format("layer {} {}", index, name), prefix(index));
    fill(Tensors(block, spec, extents, c.init_stddev), block);
    blocks.push_back(block.finish());
  };
  add("attention", [&](Tensors tensors, BlockBuilder& block) {
    block.content(BlockContent::attention_half);
    tensors.attention_inputs(c);
    tensors.last_linear(spec.attention_out, attention_width(extents, spec), h,
                        spec.attention_out_bias);
  });
  add("router", [&](Tensors tensors, BlockBuilder& block) {
    block.content(BlockContent::router);
    tensors.norm(spec.norm_before_mlp, h, spec.layer_norm);
    tensors.linear(experts.router, h, experts.count, false);
    if (experts.router_bias) {
      block.add(experts.router + ".bias", {experts.count}, Init::normal, c.init_stddev);
    }
    if (!experts.correction.empty()) block.add_buffer(experts.correction, experts.count);
  });
  const auto add_maps = [&](Tensors& tensors, const std::string& before, std::uint64_t width) {
    tensors.linear(before + experts.gate, h, width, false);
    tensors.linear(before + experts.up, h, width, false);
    tensors.last_linear(before + experts.down, width, h, false);
  };
  if (experts.shared_width > 0) {
    add("shared expert", [&](Tensors tensors, BlockBuilder& block) {
      block.content(BlockContent::shared_expert);
      if (!experts.shared_gate.empty()) tensors.linear(experts.shared_gate, h, 1, false);
      add_maps(tensors, experts.shared_prefix, experts.shared_width);
    });
  }
  const double share = static_cast<double>(experts.per_token) / static_cast<double>(experts.count);
  for (std::uint64_t e = 0; e < experts.count; ++e) {
    add(fmt::format("expert {}", e), [&](Tensors tensors, BlockBuilder& block) {
      block.expert(e, share);
      if (experts.fused) {
        tensors.fused_maps(experts, e, h);
      } else if (experts.stacked) {
        tensors.stacked_maps(experts, e, h);
      } else {
        add_maps(tensors, experts.of_expert(e, ""), experts.width);
      }
    });
  }
  return blocks;
}

std::string DecoderFamily::obstacle_to_tiles(const ModelConfig& config,
                                             std::uint64_t places) const {
  for (std::uint64_t index = 0; index < config.num_layers; ++index) {
    const DecoderSpec spec = decoder(config, index);
    if (spec.experts.count > 0) return "some have experts";
    if (places > 1 && spec.delta.key_heads > 0) return "tensor places cannot share delta nets";
  }
  const DecoderSpec spec = decoder(config, 0);
  if (!spec.norm_after_attention.empty() || !spec.norm_after_mlp.empty()) {
    return "they have norms after attention or the MLP";
  }
  if (spec.norm_before_attention.empty() || spec.norm_before_mlp.empty()) {
    return "they lack a norm before attention or the MLP";
  }
  if (spec.norms_values) return "values have norms";
  if (spec.parallel) return "attention and the MLP read the same residual stream";
  if (spec.latent.rank > 0) return "queries, keys and values are maps of low rank";
  if (!spec.query_norm.empty()) {
    if (spec.norms_whole_rows) return "norms of queries and keys join all heads";
    if (spec.qkv.size() != 3) return "queries and keys with norms have a fused map";
    if (places > 1) return "tensor places cannot share the norms of queries and keys";
  }
  if (!spec.sinks.empty()) return "attention has sinks";
  if (spec.mlp_in.empty()) return "they have no MLP";
  return "";
}

std::vector<BlockSpec> DecoderFamily::layer_tiles(const ModelConfig& c, std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  std::vector<BlockSpec> blocks;
  const auto add = [&](BlockContent content, const std::string& name, const auto& fill) {
    BlockBuilder block(BlockKind::layer, fmt::format("layer {} {}", index, name), prefix(index));
    block.content(content);
    fill(Tensors(block, spec, heads(c, index), c.init_stddev));
    blocks.push_back(block.finish());
  };
  const auto add_norm = [&](const char* half, const std::string& name) {
    add(BlockContent::norm, half, [&](Tensors tensors) {
      tensors.norm(name, c.hidden_size, spec.layer_norm);
      if (name != spec.norm_before_attention) return;
      tensors.head_norms();
      tensors.delta_norm();
    });
  };
  add_norm("attention", spec.norm_before_attention);
  const std::uint64_t attention = attention_tiles(c, index);
  for (std::uint64_t t = 0; t < attention; ++t) {
    add(BlockContent::attention, fmt::format("attention {}", t),
        [&](Tensors tensors) { tensors.attention_tile(c, attention, t); });
  }
  add_norm("mlp", spec.norm_before_mlp);
  for (std::uint64_t t = 0; t < c.layer_tiles; ++t) {
    const TileRange wide = tile_range(c.intermediate_size, c.layer_tiles, t);
    add(BlockContent::mlp, fmt::format("mlp {}", t),
        [&](Tensors tensors) { tensors.mlp_tile(c, wide); });
  }
  return blocks;
}

bool DecoderFamily::depends_on_documents(const ModelConfig& config, std::uint64_t length) const {
  const std::vector<Rotary> all = rotaries_of(config);
  return std::any_of(all.begin(), all.end(),
                     [&](const Rotary& one) { return one.depends_on_documents(length); });
}

std::vector<Rotary> DecoderFamily::rotaries_of(const ModelConfig& config) const {
  return rotaries(config, [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, fmt::format("model.{}: {}", key, rule));
  });
}

const DecoderFamily& decoder_family(const ModelConfig& config) {
  const auto* const found = dynamic_cast<const DecoderFamily*>(&family(config.family));
  expects(found != nullptr, "the family is not described by a DecoderSpec");
  return *found;
}

}  // namespace ballast::model
