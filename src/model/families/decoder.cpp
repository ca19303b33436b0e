#include "src/model/families/decoder.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/tiles.h"

namespace ballast::model {
namespace {

/// Adds the tensors of a DecoderSpec to a block.
class Tensors {
 public:
  Tensors(BlockBuilder& block, const DecoderSpec& spec, double stddev)
      : block_(block), spec_(spec), stddev_(stddev) {}

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
  /// Some of the outputs of a map [out, in]: its rows.
  void rows(const std::string& name, std::uint64_t in, std::uint64_t out, const TileRange& range,
            bool biased) {
    block_.add(name + ".weight", {range.size, in}, Init::normal, stddev_);
    block_.rows_of(out, range.first);
    if (!biased) return;
    block_.add(name + ".bias", {range.size}, Init::zeros);
    block_.rows_of(out, range.first);
  }
  /// Some of the inputs of the last map [out, in] of a tile: its columns.
  void last_columns(const std::string& name, std::uint64_t in, std::uint64_t out,
                    const TileRange& range) {
    block_.add_last_product(name + ".weight", {out, range.size}, spec_.residual_factor * stddev_);
    block_.columns_of(in, range.first);
  }
  /// The last product of the layer, unless a norm follows.
  void last_linear(const std::string& name, std::uint64_t in, std::uint64_t out) {
    if (!spec_.norm_after_mlp.empty()) {
      linear(name, in, out, spec_.mlp_bias, spec_.residual_factor);
      return;
    }
    block_.add_last_product(name + ".weight", shape(in, out), spec_.residual_factor * stddev_);
    bias(name, out, spec_.mlp_bias);
  }

 private:
  [[nodiscard]] std::vector<std::uint64_t> shape(std::uint64_t in, std::uint64_t out) const {
    if (spec_.conv1d) return {in, out};
    return {out, in};
  }
  void bias(const std::string& name, std::uint64_t out, bool biased) {
    if (biased) block_.add(name + ".bias", {out}, Init::zeros);
  }

  BlockBuilder& block_;
  const DecoderSpec& spec_;
  double stddev_;
};

}  // namespace

BlockSpec DecoderFamily::layer(const ModelConfig& c, std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  const std::uint64_t h = c.hidden_size;
  const std::uint64_t wide = c.intermediate_size;
  const std::uint64_t q = c.num_heads * c.head_dim;
  const std::uint64_t kv = c.num_kv_heads * c.head_dim;
  BlockBuilder block(BlockKind::layer, fmt::format("layer {}", index), prefix(index));
  Tensors tensors(block, spec, c.init_stddev);

  tensors.norm(spec.norm_before_attention, h, spec.layer_norm);
  if (spec.qkv.size() == 1) {
    tensors.linear(spec.qkv.front(), h, q + 2 * kv, spec.qkv_bias);
    if (spec.interleaved_qkv) block.stored_by({3, c.num_heads});
  } else {
    tensors.linear(spec.qkv.at(0), h, q, spec.qkv_bias);
    tensors.linear(spec.qkv.at(1), h, kv, spec.qkv_bias);
    tensors.linear(spec.qkv.at(2), h, kv, spec.qkv_bias);
  }
  tensors.norm(spec.query_norm, spec.norms_whole_rows ? q : c.head_dim, false);
  tensors.norm(spec.key_norm, spec.norms_whole_rows ? kv : c.head_dim, false);
  block.attend(q, spec.window);
  tensors.linear(spec.attention_out, q, h, spec.attention_out_bias, spec.residual_factor);
  tensors.norm(spec.norm_after_attention, h, spec.layer_norm);
  tensors.norm(spec.norm_before_mlp, h, spec.layer_norm);
  const std::uint64_t in_width = spec.gated && spec.mlp_in.size() == 1 ? 2 * wide : wide;
  for (const std::string& name : spec.mlp_in) tensors.linear(name, h, in_width, spec.mlp_bias);
  tensors.last_linear(spec.mlp_out, wide, h);
  tensors.norm(spec.norm_after_mlp, h, spec.layer_norm);
  return block.finish();
}

bool DecoderFamily::cuts_layers(const ModelConfig& config) const {
  const DecoderSpec spec = decoder(config, 0);
  return !spec.norm_before_attention.empty() && !spec.norm_before_mlp.empty() &&
         spec.norm_after_attention.empty() && spec.norm_after_mlp.empty() && !spec.parallel &&
         spec.qkv.size() == 3 && spec.query_norm.empty() && spec.key_norm.empty() && spec.gated &&
         spec.mlp_in.size() == 2 && !spec.conv1d && !spec.attention_out_bias && !spec.mlp_bias;
}

std::vector<BlockSpec> DecoderFamily::layer_tiles(const ModelConfig& c, std::uint64_t index) const {
  const DecoderSpec spec = decoder(c, index);
  const std::uint64_t h = c.hidden_size;
  const std::uint64_t q = c.num_heads * c.head_dim;
  const std::uint64_t kv = c.num_kv_heads * c.head_dim;
  std::vector<BlockSpec> blocks;
  const auto add = [&](LayerPart part, const std::string& name, const auto& fill) {
    BlockBuilder block(BlockKind::layer, fmt::format("layer {} {}", index, name), prefix(index));
    block.part(part);
    fill(Tensors(block, spec, c.init_stddev), block);
    blocks.push_back(block.finish());
  };
  const auto add_norm = [&](const char* half, const std::string& name) {
    add(LayerPart::norm, half,
        [&](Tensors tensors, BlockBuilder&) { tensors.norm(name, h, spec.layer_norm); });
  };
  add_norm("attention", spec.norm_before_attention);
  const std::uint64_t attention = attention_tiles(c);
  for (std::uint64_t t = 0; t < attention; ++t) {
    const TileRange heads = {t * q / attention, q / attention};
    const TileRange kv_heads = {t * kv / attention, kv / attention};
    add(LayerPart::attention, fmt::format("attention {}", t),
        [&](Tensors tensors, BlockBuilder& block) {
          tensors.rows(spec.qkv[0], h, q, heads, spec.qkv_bias);
          tensors.rows(spec.qkv[1], h, kv, kv_heads, spec.qkv_bias);
          tensors.rows(spec.qkv[2], h, kv, kv_heads, spec.qkv_bias);
          block.attend(heads.size, spec.window);
          tensors.last_columns(spec.attention_out, q, h, heads);
        });
  }
  add_norm("mlp", spec.norm_before_mlp);
  for (std::uint64_t t = 0; t < c.layer_tiles; ++t) {
    const TileRange wide = tile_range(c.intermediate_size, c.layer_tiles, t);
    add(LayerPart::mlp, fmt::format("mlp {}", t), [&](Tensors tensors, BlockBuilder&) {
      for (const std::string& name : spec.mlp_in) {
        tensors.rows(name, h, c.intermediate_size, wide, false);
      }
      tensors.last_columns(spec.mlp_out, c.intermediate_size, h, wide);
    });
  }
  return blocks;
}

const DecoderFamily& decoder_family(const ModelConfig& config) {
  const auto* const found = dynamic_cast<const DecoderFamily*>(&family(config.family));
  expects(found != nullptr, "the family is not described by a DecoderSpec");
  return *found;
}

}  // namespace ballast::model
