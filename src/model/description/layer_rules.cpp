#include "src/model/description/layer_rules.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"

namespace ballast::model {

std::vector<LayerSpec> layers_of(const ModelConfig& config) {
  const Family& described = family(config.family);
  std::vector<LayerSpec> layers;
  for (std::uint64_t index = 0; index < config.num_layers; ++index) {
    layers.push_back(described.layer(config, index));
  }
  return layers;
}

std::uint64_t tiles_of(const BodySpec& body, std::uint64_t most) {
  if (const auto* const attention = std::get_if<AttentionSpec>(&body)) {
    return tiles_of_heads(attention->heads.kv_heads, most);
  }
  if (const auto* const delta = std::get_if<DeltaSpec>(&body)) {
    return tiles_of_heads(delta->key_heads, most);
  }
  if (const auto* const convolution = std::get_if<ConvolutionSpec>(&body)) {
    constexpr std::uint64_t kPack = 8;  // channels that GPUs load at once
    const std::uint64_t channels = convolution->channels;
    return tiles_of_heads(channels % kPack == 0 ? channels / kPack : channels, most);
  }
  return most;
}

namespace {

/// Returns the obstacle in maps to queries, keys and values, which need not be those of heads.
std::string obstacle_in(const AttentionSpec& attention, std::uint64_t places) {
  const auto* const maps = std::get_if<HeadMaps>(&attention.maps);
  if (maps == nullptr) return "queries, keys and values are maps of low rank";
  if (!maps->gate.name.empty()) return "gates of attention have their own map";
  if (maps->query_norm) {
    if (maps->query_norm->name.empty()) return "norms of queries and keys have no weights";
    if (maps->whole_rows) return "norms of queries and keys join all heads";
    if (maps->maps.size() != 3) return "queries and keys with norms have a fused map";
    if (places > 1) return "tensor places cannot share the norms of queries and keys";
  }
  return attention.sinks.empty() ? "" : "attention has sinks";
}

std::string obstacle_in(const LayerSpec& layer, std::uint64_t places) {
  const auto any = [&](auto has) { return std::ranges::any_of(layer.sublayers, has); };
  const auto* const attention = layer.find<AttentionSpec>();
  const HeadMaps* const maps = layer.head_maps();
  if (any([](const SublayerSpec& one) { return one.factor != 1.0; })) {
    return "results of attention and the MLP have factors";
  }
  if (any([](const SublayerSpec& one) { return one.after.has_value(); })) {
    return "they have norms after attention or the MLP";
  }
  if (any([](const SublayerSpec& one) { return !one.before; })) {
    return "they lack a norm before attention or the MLP";
  }
  if (maps != nullptr && maps->value_norm) return "values have norms";
  if (layer.input_norm) return "their input has a norm";
  if (any([](const SublayerSpec& one) { return one.reads != Reads::stream; })) {
    return "attention and the MLP read the same residual stream";
  }
  std::string in_attention = attention == nullptr ? "" : obstacle_in(*attention, places);
  if (!in_attention.empty()) return in_attention;
  return layer.find<MlpSpec>() == nullptr ? "they have no MLP" : "";
}

}  // namespace

std::string obstacle_to_tiles(std::span<const LayerSpec> layers, std::uint64_t places) {
  for (const LayerSpec& layer : layers) {
    if (layer.find<ExpertsSpec>() != nullptr) return "some have experts";
    if (places > 1 && layer.find<DeltaSpec>() != nullptr) {
      return "tensor places cannot share delta nets";
    }
    if (places > 1 && layer.find<ConvolutionSpec>() != nullptr) {
      return "tensor places cannot share convolutions";
    }
  }
  for (const LayerSpec& layer : layers) {
    std::string obstacle = obstacle_in(layer, places);
    if (!obstacle.empty()) return obstacle;
  }
  return "";
}

LayerSpec widest_tile(LayerSpec layer, std::uint64_t tiles) {
  for (SublayerSpec& sublayer : layer.sublayers) {
    const std::uint64_t parts = tiles_of(sublayer.body, tiles);
    if (auto* const attention = std::get_if<AttentionSpec>(&sublayer.body)) {
      attention->heads.heads /= parts;
      attention->heads.kv_heads /= parts;
    } else if (auto* const delta = std::get_if<DeltaSpec>(&sublayer.body)) {
      delta->key_heads /= parts;
      delta->value_heads /= parts;
    } else if (auto* const convolution = std::get_if<ConvolutionSpec>(&sublayer.body)) {
      convolution->channels /= parts;
    } else if (auto* const mlp = std::get_if<MlpSpec>(&sublayer.body)) {
      std::uint64_t widest = 0;
      for (std::uint64_t t = 0; t < tiles; ++t) {
        widest = std::max(widest, tile_range(mlp->width, tiles, t).size);
      }
      mlp->width = widest;
    }
  }
  return layer;
}

std::vector<LayerSpec> widest_tiles(const Architecture& model) {
  const ModelConfig& config = model.config;
  std::vector<LayerSpec> specs = *model.layers;
  if (specs.empty()) specs.push_back(family(config.family).layer(config, 0));
  for (LayerSpec& spec : specs) spec = widest_tile(std::move(spec), config.layer_tiles);
  return specs;
}

HeadExtents heads_of(const LayerSpec& layer, const ModelConfig& config) {
  if (const auto* const attention = layer.find<AttentionSpec>()) return attention->heads;
  return {config.num_heads, config.num_kv_heads, config.head_dim};
}

namespace {

std::uint64_t widest_sum_of(const BodySpec& body) {
  if (const auto* const mlp = std::get_if<MlpSpec>(&body)) return mlp->width;
  if (const auto* const both = std::get_if<MlpWithExpertsSpec>(&body)) {
    return std::max(both->mlp.width, both->experts.count);
  }
  if (const auto* const inputs = std::get_if<LayerEmbeddingSpec>(&body)) return inputs->width;
  if (const auto* const experts = std::get_if<ExpertsSpec>(&body)) {
    return std::max(experts->count, experts->stacked ? 2 * experts->width : 0);
  }
  const auto* const attention = std::get_if<AttentionSpec>(&body);
  const auto* const latent =
      attention == nullptr ? nullptr : std::get_if<LatentMaps>(&attention->maps);
  return latent == nullptr ? 0 : std::max(latent->query_rank, latent->rank + latent->rotating);
}

}  // namespace

std::uint64_t widest_sum(std::span<const LayerSpec> layers) {
  std::uint64_t widest = 0;
  for (const LayerSpec& layer : layers) {
    for (const SublayerSpec& sublayer : layer.sublayers) {
      widest = std::max(widest, widest_sum_of(sublayer.body));
    }
  }
  return widest;
}

std::uint64_t keys_of(std::span<const LayerSpec> layers, std::uint64_t index) {
  const auto* const attention = layers[index].find<AttentionSpec>();
  return attention == nullptr ? index : attention->keys_of.value_or(index);
}

std::uint64_t last_reader_of_keys(std::span<const LayerSpec> layers, std::uint64_t index) {
  std::uint64_t last = index;
  for (std::uint64_t layer = index + 1; layer < layers.size(); ++layer) {
    if (keys_of(layers, layer) == index) last = layer;
  }
  return last;
}

std::uint64_t layer_input_width(std::span<const LayerSpec> layers) {
  for (const LayerSpec& layer : layers) {
    if (const auto* const inputs = layer.find<LayerEmbeddingSpec>()) return inputs->width;
  }
  return 0;
}

bool links_layers(std::span<const LayerSpec> layers) {
  if (any_has<LayerEmbeddingSpec>(layers)) return true;
  return std::ranges::any_of(layers, [](const LayerSpec& layer) {
    const auto* const attention = layer.find<AttentionSpec>();
    return attention != nullptr && attention->keys_of;
  });
}

bool norms_surround_experts(std::span<const LayerSpec> layers) {
  return std::ranges::any_of(layers, [](const LayerSpec& layer) {
    const SublayerSpec& last = layer.sublayers.back();
    return std::holds_alternative<ExpertsSpec>(last.body) &&
           (last.after || last.reads == Reads::same_norm);
  });
}

std::vector<Rotary> rotaries_of(const ModelConfig& config) {
  return family(config.family).rotaries(config, [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, fmt::format("model.{}: {}", key, rule));
  });
}

bool depends_on_documents(const ModelConfig& config, std::uint64_t length) {
  return std::ranges::any_of(rotaries_of(config),
                             [&](const Rotary& one) { return one.depends_on_documents(length); });
}

RouterLosses router_losses(const ModelConfig& c) {
  if (!c.details.contains("router_z_loss_coef")) return {};
  const bool balances = c.flag("output_router_logits");
  return {balances ? c.number("router_aux_loss_coef") : 0.0, c.number("router_z_loss_coef")};
}

}  // namespace ballast::model
