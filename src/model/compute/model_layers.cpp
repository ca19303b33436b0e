#include "src/model/compute/model_layers.h"

#include <algorithm>
#include <variant>

#include "ballast/core/error.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {
namespace {

/// Returns how layer `layer` shares keys and values with others.
KeySharing sharing_of(const std::vector<LayerSpec>& specs, std::uint64_t layer) {
  const std::uint64_t source = keys_of(specs, layer);
  const std::uint64_t last = last_reader_of_keys(specs, source);
  return {source != layer, source == layer && last != layer, last == layer};
}

/// The norms of heads that tiles share, with their places in HeadNorms.
struct SharedNorm {
  NormSpec norm;
  std::size_t place = 0;
  std::size_t width = 0;
};
std::vector<SharedNorm> shared_norms(const BodySpec& body, const HeadNorms& places) {
  if (const auto* const delta = std::get_if<DeltaSpec>(&body)) {
    return {{delta->norm, 0, delta->value_width}};
  }
  const auto* const attention = std::get_if<AttentionSpec>(&body);
  const auto* const maps = attention == nullptr ? nullptr : std::get_if<HeadMaps>(&attention->maps);
  if (maps == nullptr || !maps->query_norm || !maps->key_norm) return {};
  return {{*maps->query_norm, 0, attention->heads.head_dim},
          {*maps->key_norm, places.keys(), attention->heads.head_dim}};
}

/// Places of the norms of heads in layers that are cut into tiles. `tokens`: rows.
HeadNorms head_norms_of(const ModelConfig& config, const std::vector<LayerSpec>& specs,
                        std::size_t tokens) {
  if (config.layer_tiles == 1) return {};
  std::size_t width = 0;
  std::size_t tiles = 0;
  for (std::uint64_t i = 0; i < specs.size(); ++i) {
    for (const SublayerSpec& sublayer : specs[i].sublayers) {
      for (const SharedNorm& norm : shared_norms(sublayer.body, {})) {
        width = std::max(width, norm.width);
      }
    }
    tiles = std::max<std::size_t>(tiles, attention_tiles(config, i));
  }
  if (width == 0) return {};
  return {tokens * config.hidden_size, width, tiles};
}

}  // namespace

template <class T>
ModelLayers<T>::ModelLayers(const Architecture& model, const AttentionShape& shape,
                            DeviceOps<T>& ops)
    : specs_(widest_tiles(model)),
      shapes_(attention_shapes(config_of_tile(model.config),
                               {shape.sequences, shape.length, shape.slices})),
      widest_(width_of_mlps(config_of_tile(model.config).intermediate_size)),
      tools_(make_tools(model, shape, ops)) {
  for (const BlockSpec& block : model.blocks) {
    if (block.kind == BlockKind::layer) add_block(model.config, block);
  }
  workspace_ = workspace_bytes();
  for (const LayerSpec& spec : specs_) {
    const auto* const delta = spec.find<DeltaSpec>();
    if (delta == nullptr || (!tools_.tiles && delta->convolution.size() == 1)) continue;
    taps_ = delta->channels() * delta->taps;
  }
}

template <class T>
void ModelLayers<T>::take_memory(Bump& bump) {
  shared_ = bump.take<std::byte>(workspace_);
  tools_.attention_scratch = bump.take<std::byte>(tools_.ops.attention->attention_scratch_bytes());
  tools_.exchange.take_memory(bump);
  typename AdaptedMaps<T>::Most most;
  for (const auto& block : blocks_) {
    if (block.passes == nullptr) continue;
    block.passes->for_maps([&](const LinearAt& map, std::size_t rows) { most.add(map, rows); });
  }
  tools_.maps.take_memory(bump, most);
  // Parts of the same kind share their scratch.
  const Bump start = bump;
  for (const auto& block : blocks_) {
    if (block.passes == nullptr) continue;
    Bump own = start;
    block.passes->take_scratch(own);
    if (own.used() > bump.used()) bump = own;
  }
  tools_.mixer_scratch = bump.take<std::byte>(tools_.ops.mixers->scratch_bytes());
  tools_.taps = bump.take<T>(taps_);
  tools_.taps_gradient = bump.take<float>(taps_);
}

template <class T>
void ModelLayers<T>::take_lasting_memory(Bump& bump) {
  tools_.rotation.take_memory(bump);
  if (has_unit_norms()) tools_.unit_norm.take_memory(bump);
}

template <class T>
std::size_t ModelLayers<T>::intermediate_bytes(std::size_t layer) const {
  return passes(layer).arrays(true).bytes();
}

template <class T>
std::size_t ModelLayers<T>::attention_bytes(std::size_t layer) const {
  return passes(layer).arrays(true).known_bytes();
}

template <class T>
void ModelLayers<T>::forward(device::Stream& stream, const BlockWeights<T>& block,
                             const LayerSequences& sequences, const T* in, T* out,
                             const KeptValues& kept, const LayerLinks<T>& links) {
  Call call = begin(stream, block, sequences, kept, links);
  passes(block.layer).forward(call, in, out);
}

template <class T>
void ModelLayers<T>::backward(device::Stream& stream, const BlockWeights<T>& block,
                              const LayerSequences& sequences, const T* in, T* dy,
                              const KeptValues& kept, const LayerLinks<T>& links) {
  Call call = begin(stream, block, sequences, kept, links);
  call.backward = true;
  passes(block.layer).backward(call, in, dy);
}

template <class T>
NormAt ModelLayers<T>::norm_of(std::size_t layer) const {
  expects(blocks_[layer].norm.has_value(), "the block is not a norm before tiles");
  return *blocks_[layer].norm;
}

template <class T>
void ModelLayers<T>::append_head_norms(const BlockWeights<T>& block, T* normed) {
  T* const to = head_norms().weights(normed);
  for (const HeadNormAt& own : blocks_[block.layer].head_norms) {
    tools_.ops.elementwise->copy_bytes(reinterpret_cast<const std::byte*>(block[own.norm].weight),
                                       reinterpret_cast<std::byte*>(to + own.place),
                                       own.width * sizeof(T));
  }
}

template <class T>
void ModelLayers<T>::add_head_norm_gradients(const BlockWeights<T>& block, const float* sums) {
  const Block& own = blocks_[block.layer];
  for (std::size_t tile = 0; tile < own.tiles; ++tile) {
    const float* const slice = head_norms().slice(sums, tile);
    for (const HeadNormAt& norm : own.head_norms) {
      float* const gradient = block[norm.norm].weight_gradient;
      if (gradient != nullptr)
        tools_.ops.elementwise->accumulate(slice + norm.place, gradient, norm.width);
    }
  }
}

template <class T>
void ModelLayers<T>::forward_tile(const BlockWeights<T>& block, const LayerSequences& sequences,
                                  const T* x, float* part) {
  passes(block.layer).forward_tile(call_of_tile(block, sequences, x, nullptr), x, part);
}

template <class T>
void ModelLayers<T>::backward_tile(const BlockWeights<T>& block, const LayerSequences& sequences,
                                   const T* x, const T* dy, float* part, float* slice) {
  passes(block.layer).backward_tile(call_of_tile(block, sequences, x, slice), x, dy, part);
}

template <class T>
LayerTools<T> ModelLayers<T>::make_tools(const Architecture& model, const AttentionShape& shape,
                                         DeviceOps<T>& ops) const {
  std::size_t width = 0;
  for (const AttentionShape& one : shapes_) width = std::max(width, one.head_dim);
  const ModelConfig& config = model.config;
  const bool of_rows = std::any_of(specs_.begin(), specs_.end(), [](const LayerSpec& spec) {
    return spec.input_norm.has_value();
  });
  if (of_rows) width = std::max<std::size_t>(width, config.hidden_size);
  return {.ops = ops,
          .maps = {model, ops},
          .exchange = {shapes_, ops},
          .rotation = {rotaries_of(config), shape, ops},
          .unit_norm = {width, ops},
          .shape = shape,
          .hidden = config.hidden_size,
          .mlp_rows = chunk_rows(shape.tokens(), (is_gated() ? 3 : 2) * widest_ * sizeof(T),
                                 ops.traits.mlp.bytes),
          .layers = config.num_layers,
          .norm_epsilon = static_cast<float>(config.norm_epsilon),
          .tiles = config.layer_tiles > 1,
          .head_norms = head_norms_of(config, specs_, shape.tokens())};
}

template <class T>
bool ModelLayers<T>::is_gated() const {
  for (const SublayerSpec& sublayer : specs_.front().sublayers) {
    if (const MlpSpec* const mlp = mlp_of(sublayer.body)) return mlp->gated;
  }
  return true;
}

template <class T>
std::size_t ModelLayers<T>::width_of_mlps(std::size_t of_config) const {
  std::size_t width = any_has<ExpertsSpec>(specs_) ? of_config : 0;
  for (const LayerSpec& spec : specs_) {
    for (const SublayerSpec& sublayer : spec.sublayers) {
      const MlpSpec* const mlp = mlp_of(sublayer.body);
      if (mlp != nullptr) width = std::max<std::size_t>(width, mlp->width);
    }
  }
  return width > 0 ? width : of_config;
}

template <class T>
bool ModelLayers<T>::has_unit_norms() const {
  return std::any_of(specs_.begin(), specs_.end(), [](const LayerSpec& spec) {
    const HeadMaps* const maps = spec.head_maps();
    const bool plain = maps != nullptr && maps->query_norm && maps->query_norm->name.empty();
    return plain || spec.input_norm || (maps != nullptr && maps->value_norm);
  });
}

template <class T>
void ModelLayers<T>::add_block(const ModelConfig& config, const BlockSpec& block) {
  const LayerSpec& spec = specs_[block.layer];
  Block made = {.heads = heads_of(spec)};
  switch (block.content) {
    case BlockContent::whole:
    case BlockContent::attention_half:
    case BlockContent::attention:
      made.passes = make_passes(spec, block);
      break;
    case BlockContent::mlp:
      made.passes = make_passes(with_attention(spec), block);
      break;
    case BlockContent::norm:
      made.tiles = attention_tiles(config, block.layer);
      [[fallthrough]];
    case BlockContent::router:
    case BlockContent::result_norm:
      find_norms(spec, block, made);
      break;
    case BlockContent::shared_expert:
    case BlockContent::expert:
    case BlockContent::layer_embedding:
      break;
  }
  blocks_.push_back(std::move(made));
}

template <class T>
std::unique_ptr<LayerPasses<T>> ModelLayers<T>::make_passes(const LayerSpec& spec,
                                                            const BlockSpec& block) {
  return std::make_unique<LayerPasses<T>>(spec, block.layer, sharing_of(specs_, block.layer),
                                          &block, tools_);
}

template <class T>
void ModelLayers<T>::find_norms(const LayerSpec& spec, const BlockSpec& block, Block& made) const {
  const Binder binder(&block, spec.input_first);
  if (block.content == BlockContent::result_norm) {
    made.norm = binder.norm(*spec.sublayers.back().after);
    return;
  }
  for (const SublayerSpec& sublayer : spec.sublayers) {
    if (!sublayer.before || block.find(sublayer.before->name + ".weight") == nullptr) continue;
    made.norm = binder.norm(*sublayer.before);
    if (block.content != BlockContent::norm) continue;
    for (const SharedNorm& shared : shared_norms(sublayer.body, head_norms())) {
      made.head_norms.push_back({binder.norm(shared.norm), shared.place, shared.width});
    }
  }
}

template <class T>
std::size_t ModelLayers<T>::heads_of(const LayerSpec& spec) const {
  const auto* const attention = spec.find<AttentionSpec>();
  if (attention == nullptr) return 0;
  const auto found = std::find_if(shapes_.begin(), shapes_.end(),
                                  [own = tools_.of(*attention)](const AttentionShape& one) {
                                    return have_same_heads(one, own);
                                  });
  return static_cast<std::size_t>(found - shapes_.begin());
}

template <class T>
LayerSpec ModelLayers<T>::with_attention(LayerSpec spec) const {
  const auto found = std::find_if(specs_.begin(), specs_.end(), [](const LayerSpec& one) {
    return one.find<AttentionSpec>() != nullptr;
  });
  if (found != specs_.end()) spec.sublayers.front() = found->sublayers.front();
  return spec;
}

template <class T>
std::size_t ModelLayers<T>::workspace_bytes() {
  std::size_t most = 0;
  for (std::uint64_t i = 0; i < specs_.size(); ++i) {
    LayerSpec spec = specs_[i];
    for (SublayerSpec& sublayer : spec.sublayers) {
      if (std::holds_alternative<ExpertsSpec>(sublayer.body)) {
        sublayer.body = MlpSpec{.in = {{}, {}}};
      }
      if (MlpSpec* const mlp = mlp_of(sublayer.body)) mlp->width = widest_;
    }
    const LayerPasses<T> passes(spec, i, sharing_of(specs_, i), nullptr, tools_);
    most = std::max<std::size_t>(most, passes.arrays(false).bytes());
  }
  return most;
}

template <class T>
LayerPasses<T>& ModelLayers<T>::passes(std::size_t layer) const {
  expects(blocks_[layer].passes != nullptr, "the block is not a layer or a tile of one");
  return *blocks_[layer].passes;
}

template <class T>
typename ModelLayers<T>::Call ModelLayers<T>::begin(device::Stream& stream,
                                                    const BlockWeights<T>& block,
                                                    const LayerSequences& sequences,
                                                    const KeptValues& kept,
                                                    const LayerLinks<T>& links) {
  const Block& own = blocks_[block.layer];
  if (shapes_.size() > 1) {
    tools_.ops.attention->use_heads(own.heads);
    tools_.exchange.use_heads(shapes_[own.heads]);
  }
  tools_.exchange.use(sequences.slice, stream);
  const bool keeps = kept.all != nullptr;
  return {.block = block,
          .head_norms = block,
          .sequences = sequences,
          .links = links,
          .list = &passes(block.layer).arrays(keeps),
          .memory = keeps ? kept.all : shared_,
          .known = kept.attention,
          .kept = keeps};
}

template <class T>
typename ModelLayers<T>::Call ModelLayers<T>::call_of_tile(const BlockWeights<T>& block,
                                                           const LayerSequences& sequences,
                                                           const T* x, float* slice) const {
  Call call = {.block = block,
               .head_norms = {.weights = head_norms().weights(x)},
               .sequences = sequences,
               .list = &passes(block.layer).arrays(false),
               .memory = shared_};
  if (slice != nullptr) call.head_norms.gradient = {slice, head_norms().size()};
  return call;
}

template class ModelLayers<float>;
template class ModelLayers<Bf16>;
template class ModelLayers<F16>;

}  // namespace ballast::model
