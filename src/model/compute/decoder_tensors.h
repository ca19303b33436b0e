#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "src/model/compute/delta_net.h"
#include "src/model/compute/latent_attention.h"
#include "src/model/compute/layer_experts.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/compute/shared_values.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Positions of tensors in a block. A part of a layer lacks the tensors of the other parts.
struct DecoderTensors {
  BlockContent content = BlockContent::whole;
  std::optional<NormAt> norm_before_attention;
  std::optional<NormAt> norm_after_attention;
  std::optional<NormAt> norm_before_mlp;
  std::optional<NormAt> norm_after_mlp;
  std::vector<LinearAt> qkv;       ///< outputs side by side in a row
  std::optional<LatentAt> latent;  ///< replaces qkv
  std::optional<DeltaAt> delta;    ///< replaces attention
  bool output_gate = false;
  std::optional<NormAt> query_norm;  ///< in a tile: offsets in the weights of HeadNorms
  std::optional<NormAt> key_norm;
  std::optional<NormAt> delta_norm;  ///< that of tiles, in the block of the norm before them
  std::size_t attention_tiles = 1;
  bool norms_whole_rows = false;
  bool norms_values = false;     ///< norms of heads of values have no weights
  bool keys_are_values = false;  ///< qkv has no map of values
  std::optional<Elems> result_scale;
  std::optional<LayerExpertsAt> experts;
  std::optional<LayerEmbeddingAt> inputs;
  SharedKeysAt shared_keys;
  bool parallel = false;
  bool rotates = false;
  // Indices in rotaries_of(), of keys and of queries.
  std::size_t rotary = 0;
  std::size_t query_rotary = 0;
  std::size_t query_growth = 0;  ///< 0: none
  std::size_t window = 0;
  std::optional<Elems> sinks;
  LinearAt attention_out;
  bool gated = false;
  Activation activation = Activation::silu;
  std::vector<LinearAt>
      mlp_in;  ///< outputs side by side if one map makes both, else consecutive arrays
  LinearAt mlp_out;
};

/// Replaces maps of latent attention, finds the norm of tiles of a delta net, points the norms of
/// heads in a tile to the weights that the norm's block has handed over, and joins maps of queries,
/// keys and values where that is possible.
inline void complete_qkv(DecoderTensors& b, const DecoderSpec& spec, const HeadNorms& norms,
                         const BlockSpec& block) {
  if (spec.latent.rank > 0 && !b.qkv.empty()) {
    b.latent = find_latent(block, spec.latent, b.qkv.front());
    b.qkv.clear();
  }
  if (spec.delta.key_heads > 0 && !b.qkv.empty()) {
    b.delta = find_delta(block, spec.delta, b.qkv);
    b.qkv.clear();
  }
  if (block.content == BlockContent::norm && block.find(spec.delta.norm + ".weight") != nullptr) {
    b.delta_norm = find_norm(block, spec.delta.norm);
  }
  if (block.content == BlockContent::attention && !spec.query_norm.empty()) {
    b.query_norm = NormAt{.offset = spec.norm_offset};
    b.key_norm = NormAt{.weight = norms.keys(), .offset = spec.norm_offset};
  }
  if (b.query_norm && block.content != BlockContent::norm) {
    expects(b.qkv.size() == 3 || b.keys_are_values || spec.reads_keys,
            "queries and keys with norms need separate maps");
    expects(!b.keys_are_values || b.norms_values, "values that are keys need norms");
  } else {
    b.qkv = joined(b.qkv);
  }
}

/// Returns the place of a tensor; nothing if the block does not have it or `name` is empty.
inline std::optional<Elems> find_offset(const BlockSpec& block, const std::string& name) {
  const TensorSpec* const tensor = name.empty() ? nullptr : block.find(name);
  return tensor == nullptr ? std::nullopt : std::optional(tensor->offset);
}

/// Finds the tensors of a layer that a DecoderSpec describes, or of a part of one.
inline DecoderTensors find_decoder_tensors(const ModelConfig& config, const BlockSpec& block,
                                           const MlpRule& rule, const HeadNorms& norms) {
  if (block.content == BlockContent::layer_embedding) return {.content = block.content};
  const DecoderSpec spec = decoder_family(config).decoder(config, block.layer);
  const auto is_elsewhere = [&](const std::string& name) {
    return block.content != BlockContent::whole && block.find(name + ".weight") == nullptr;
  };
  const auto norm = [&](const std::string& name) {
    return name.empty() || is_elsewhere(name)
               ? std::nullopt
               : std::optional(find_norm(block, name, spec.norm_offset));
  };
  const auto linear = [&](const std::string& name) {
    if (is_elsewhere(name)) return LinearAt();
    return spec.conv1d ? find_conv1d(block, name) : find_linear(block, name);
  };
  const auto linears = [&](const std::vector<std::string>& names) {
    std::vector<LinearAt> maps;
    for (const std::string& name : names) {
      if (is_elsewhere(name)) continue;
      for (const LinearAt& map : find_ranges(block, name, linear(name))) maps.push_back(map);
    }
    return maps;
  };
  DecoderTensors b = {.content = block.content,
                      .norm_before_attention = norm(spec.norm_before_attention),
                      .norm_after_attention = norm(spec.norm_after_attention),
                      .norm_before_mlp = norm(spec.norm_before_mlp),
                      .norm_after_mlp = norm(spec.norm_after_mlp),
                      .qkv = linears(spec.qkv),
                      .output_gate = spec.output_gate,
                      .query_norm = norm(spec.query_norm),
                      .key_norm = norm(spec.key_norm),
                      .attention_tiles = attention_tiles(config, block.layer),
                      .norms_whole_rows = spec.norms_whole_rows,
                      .norms_values = spec.norms_values,
                      .keys_are_values = spec.qkv.size() == 2,
                      .result_scale = find_offset(block, spec.result_scale),
                      .parallel = spec.parallel,
                      .rotates = spec.rotates,
                      .rotary = spec.rotary,
                      .query_rotary = spec.query_rotary == 0 ? spec.rotary : spec.query_rotary,
                      .query_growth = spec.query_growth,
                      .window = spec.window,
                      .sinks = find_offset(block, spec.sinks),
                      .attention_out = linear(spec.attention_out),
                      .gated = spec.gated,
                      .activation = spec.activation,
                      .mlp_in = linears(spec.mlp_in),
                      .mlp_out = linear(spec.mlp_out)};
  if (spec.layer_experts.count > 0) b.experts = find_layer_experts(block, spec.layer_experts);
  if (spec.inputs.width > 0) b.inputs = find_layer_embedding(block, spec.inputs, config);
  b.shared_keys = find_shared_keys(config, block.layer);
  complete_qkv(b, spec, norms, block);
  expects(!b.parallel || (b.norm_before_attention && b.norm_before_mlp),
          "a parallel MLP needs norms before it and before attention");
  if (rule.joins_gate_and_up) b.mlp_in = joined(b.mlp_in);
  number_adapters(b.qkv);
  number_adapters(b.mlp_in);
  return b;
}

/// Places of the norms of heads in layers that are cut into tiles.
inline HeadNorms head_norms_of(const ModelConfig& config, const AttentionShape& shape) {
  std::size_t width = 0;
  std::size_t tiles = 0;
  for (std::uint64_t i = 0; i < config.num_layers; ++i) {
    const DecoderSpec spec = decoder_family(config).decoder(config, i);
    if (!spec.query_norm.empty()) width = std::max<std::size_t>(width, config.head_dim);
    if (spec.delta.key_heads > 0) width = std::max<std::size_t>(width, spec.delta.value_width);
    tiles = std::max<std::size_t>(tiles, attention_tiles(config, i));
  }
  if (config.layer_tiles == 1 || width == 0) return {};
  return {shape.tokens() * config.hidden_size, width, tiles};
}

/// Arrays that the layers of a model need. They differ at most in their mixers.
inline LayerArrays decoder_arrays(const Architecture& model, const AttentionShape& shape) {
  const DecoderFamily& family = decoder_family(model.config);
  DecoderSpec spec = family.decoder(model.config, 0);
  std::uint64_t wide = spec.mlp_width;
  for (std::uint64_t i = 1; i < model.config.num_layers; ++i) {
    DecoderSpec next = family.decoder(model.config, i);
    wide = std::max(wide, next.mlp_width);
    if (spec.delta.key_heads > 0) spec = std::move(next);
  }
  const bool tiles = model.config.layer_tiles > 1;
  const std::size_t heads = model.config.num_heads;
  return {.wide = wide,
          .mlp = spec.gated ? 3U : 2U,
          .cuts_mlp = true,
          .norm1 = !spec.norm_before_attention.empty() && !tiles,
          .projected = !spec.query_norm.empty(),
          .projected_values = spec.norms_values,
          .output_gate = spec.output_gate,
          .attention_out = !spec.norm_after_attention.empty(),
          .mlp_out = !spec.norm_after_mlp.empty(),
          .query_rank = spec.latent.query_rank,
          .rank = spec.latent.rank,
          .shared_keys = spec.latent.rotating,
          .expanded = heads * (spec.latent.plain + spec.latent.values),
          .delta = delta_shape(config_of_tile(model.config), shape),
          .tiles = tiles,
          .head_norms = head_norms_of(model.config, shape),
          .keeps_attention = true};
}

}  // namespace ballast::model
