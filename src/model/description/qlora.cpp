#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/lora.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {

namespace {

constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kMagnitude = ".lora_magnitude_vector";

/// Returns the name of a tensor's module: the name without ".weight" or ".bias".
std::string_view module_of(const TensorSpec& tensor) {
  const std::string_view name = tensor.name;
  const bool member = name.ends_with(kWeight) || name.ends_with(".bias");
  return member ? name.substr(0, name.rfind('.')) : name;
}

std::string last_part(std::string_view module) {
  return std::string(module.substr(module.rfind('.') + 1));
}

/// Returns whether the tensor is a linear map of attention or of an MLP.
bool is_plain_map(const BlockSpec& block, const TensorSpec& tensor) {
  const bool map = tensor.shape.size() == 2 && tensor.name.ends_with(kWeight);
  return map && !tensor.table && !is_layer_router(tensor) && block.kind == BlockKind::layer &&
         (block.content == BlockContent::whole || block.content == BlockContent::attention_half);
}

/// Returns whether an adapter can be named for the tensor. "all-linear" has no adapters of experts
/// and routers.
bool can_be_adapted(const BlockSpec& block, const TensorSpec& tensor) {
  return is_plain_map(block, tensor) || is_map_of_experts(block, tensor);
}

/// Describes a tensor that cannot be adapted.
std::string_view kind_of(const BlockSpec& block, const TensorSpec& tensor) {
  if (tensor.name.ends_with("_bias")) return "a bias of experts";
  if (tensor.shape.size() == 1) return "a norm";
  if (block.kind == BlockKind::embedding) return "the embedding";
  if (tensor.table) return "an embedding";
  if (block.kind == BlockKind::head) return "the output matrix";
  if (is_layer_router(tensor)) return "a router";
  if (is_shared_gate(block, tensor)) return "the gate of a shared expert";
  return "a map of experts in one tensor";
}

/// Last parts of the names of the maps of attention and MLPs, in the order of the model.
std::vector<std::string> adaptable_names(const Architecture& model) {
  std::vector<std::string> found;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      std::string name = last_part(module_of(tensor));
      const bool known = std::find(found.begin(), found.end(), name) != found.end();
      if (is_plain_map(block, tensor) && !known) found.push_back(std::move(name));
    }
  }
  return found;
}

/// Calls `refuse` unless `target` matches maps that can be adapted, and nothing else.
void check_target(const Architecture& model, const std::string& target, const Refuse& refuse) {
  const std::vector<std::string> possible = adaptable_names(model);
  bool found = false;
  for (const BlockSpec& block : model.blocks) {
    const auto is_named = [&](const StackedMap& map) {
      return names_stack(target, model, block, map);
    };
    if (std::ranges::any_of(stacked_maps(model, block), is_named)) {
      found = true;
      continue;
    }
    for (const TensorSpec& tensor : block.tensors) {
      if (!names_map(target, model, block, module_of(tensor))) continue;
      found = true;
      if (can_be_adapted(block, tensor) || tensor.name.ends_with(".bias")) continue;
      refuse("targets", fmt::format("'{}' is {}; adapters are for linear maps of attention, "
                                    "MLPs, experts and routers: {}{}",
                                    target, kind_of(block, tensor), listed(possible),
                                    block.content == BlockContent::whole
                                        ? "; modules_to_save trains others in full"
                                        : ""));
    }
  }
  if (found) return;
  refuse("targets",
         fmt::format("'{}' matches no linear map of the model{}; use {}, or \"{}\" for all", target,
                     did_you_mean(target, possible), listed(possible), kAllLinear));
}

/// Appends a tensor to the block. freeze() sets its offset when it arranges the block.
void add_tensor(BlockSpec& block, TensorSpec tensor) {
  tensor.rows_in_all = tensor.shape[0];
  tensor.columns_in_all = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
  tensor.size = tensor.rows_in_all * tensor.columns_in_all;
  tensor.adapter = true;
  block.parameters += tensor.size;
  if (tensor.shape.size() > 1) block.product_elements += tensor.size;
  block.tensors.push_back(std::move(tensor));
}

/// Returns the values of one token that an adapter's products read and write: the forward pass
/// reads x and adds to y. The backward pass reads x twice (A x is recomputed) and dy twice, and
/// adds to dx. Dropout copies its inputs. `last`: the backward pass does not recompute y.
AdapterValues values_of_adapter(std::uint64_t in, std::uint64_t out, bool drops, bool last) {
  const std::uint64_t copied = drops ? 2 * in : 0;
  const Elems forward = in + 2 * out + copied;
  return {.forward = forward,
          .backward = 4 * in + 2 * out + 2 * copied,
          .recomputed = last ? 0 : forward};
}

/// A map that gets an adapter.
struct AdaptedMap {
  std::string module;
  std::uint64_t in = 0;
  std::uint64_t out = 0;
  StoredRows rows;            ///< order of the outputs in files
  std::uint64_t experts = 0;  ///< number of experts of a StackedMap
};

/// Adds A, B and, with DoRA, the magnitudes of a map. The backward pass recomputes A x.
void add_adapter(BlockSpec& block, const AdaptedMap& map, const AdapterConfig& wanted, bool last) {
  const std::uint64_t rank = wanted.rank_of(map.module);
  add_tensor(block, {.name = map.module + ".lora_A.weight",
                     .shape = {rank, map.in},
                     .init = Init::uniform,
                     .stddev = 1.0 / std::sqrt(static_cast<double>(map.in)),
                     .adapter_scale = wanted.scale_of(map.module)});
  if (map.experts > 0) {
    TensorSpec& a = block.tensors.back();
    a.rows_in_all = map.experts * rank;
    a.first_row = block.expert * rank;
    a.stored.once_exchanged = map.rows.once_exchanged;
  }
  // B has the rows of the map.
  add_tensor(block,
             {.name = map.module + ".lora_B.weight", .shape = {map.out, rank}, .stored = map.rows});
  if (map.experts > 0) {
    TensorSpec& b = block.tensors.back();
    b.columns_in_all = map.experts * rank;
    b.first_column = block.expert;
    b.stored.column_step = map.experts;
  }
  block.repeated_product_elements += rank * map.in;
  block.adapter_values += values_of_adapter(map.in, map.out, wanted.dropout > 0.0, last);
  if (last) block.last_product_elements += rank * (map.in + map.out);
  if (!wanted.dora) return;
  add_tensor(block, {.name = map.module + std::string(kMagnitude),
                     .shape = {map.out},
                     .init = Init::row_norms,
                     .stored = map.rows});
  // The gradient of a magnitude needs the map's result, which is recomputed.
  block.repeated_product_elements += map.out * (map.in + rank);
  block.norm_elements += map.in * map.out;
  block.norm_product_elements += rank * map.in * (map.out + rank);
}

/// `plain`: only for maps of attention and MLPs.
void add_adapters(const Architecture& model, BlockSpec& block, const AdapterConfig& wanted,
                  bool plain) {
  std::vector<TensorSpec> maps;
  for (const TensorSpec& tensor : block.tensors) {
    const bool map = plain ? is_plain_map(block, tensor) : can_be_adapted(block, tensor);
    if (map) maps.push_back(tensor);
  }
  const auto is_wanted = [&](const auto& is_named) {
    return std::ranges::any_of(wanted.targets, is_named);
  };
  const bool ends_with_map = block.last_product_elements > 0;
  for (std::size_t m = 0; m < maps.size(); ++m) {
    const TensorSpec& weight = maps[m];
    const std::string module(module_of(weight));
    if (!is_wanted(
            [&](const std::string& target) { return names_map(target, model, block, module); })) {
      continue;
    }
    const bool flipped = wanted.input_first;
    add_adapter(block,
                {module, weight.shape[flipped ? 0 : 1], weight.shape[flipped ? 1 : 0],
                 flipped ? StoredRows() : weight.stored},
                wanted, ends_with_map && m + 1 == maps.size());
  }
  if (plain) return;
  const std::vector<StackedMap> stacks = stacked_maps(model, block);
  for (const StackedMap& map : stacks) {
    if (!is_wanted(
            [&](const std::string& target) { return names_stack(target, model, block, map); })) {
      continue;
    }
    add_adapter(block, {map.name, map.in, map.out, map.rows, map.experts}, wanted,
                &map == &stacks.back());
  }
}

/// Calls `refuse` for a pattern that matches no module with an adapter, and for a rank that is too
/// large.
void check_patterns(const Architecture& model, const AdapterConfig& wanted, const Refuse& refuse) {
  constexpr std::uint64_t kMaxRank = 65536;
  std::vector<std::string> modules;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (!tensor.name.ends_with(".lora_A.weight")) continue;
      const std::string_view module = module_of(tensor);
      modules.emplace_back(module.substr(0, module.rfind('.')));
    }
  }
  const auto check = [&](const std::string& key, const ModulePatterns& patterns) {
    for (const ModulePatterns::Row& row : patterns.rows()) {
      if (!ModulePatterns::matches_any(row, modules)) {
        refuse(key, fmt::format("'{}' matches no map with an adapter; adapters have {}",
                                row.pattern, listed(wanted.targets)));
      }
      if (key == "rank_pattern" && row.value > static_cast<double>(kMaxRank)) {
        refuse(key, fmt::format("'{}' has the rank {}; at most {} is possible", row.pattern,
                                row.value, kMaxRank));
      }
    }
  };
  check("rank_pattern", wanted.rank_pattern);
  check("alpha_pattern", wanted.alpha_pattern);
}

/// Names of modules, and their last parts.
std::vector<std::string> module_names(const Architecture& model) {
  std::set<std::string> all;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (tensor.adapter) continue;
      all.insert(std::string(module_of(tensor)));
      all.insert(last_part(module_of(tensor)));
    }
  }
  return {all.begin(), all.end()};
}

/// Converts an entry of modules_to_save to a pattern of tensor names.
std::string pattern_of(const std::string& module) {
  const bool tensors = module.find_first_of("*?[") != std::string::npos ||
                       module.ends_with(kWeight) || module.ends_with(".bias");
  return tensors ? module : fmt::format("*{}.*", module);
}

/// Refuses maps that have an adapter and are also trained in full. Refuses tied embeddings, because
/// PEFT trains them separately from the output matrix.
void check_saved(const Architecture& model, const Refuse& refuse) {
  const TensorSpec* const tokens = model.blocks.front().find(model.outer.tokens);
  if (model.config.tie_embeddings && tokens != nullptr && !tokens->frozen) {
    refuse("modules_to_save",
           fmt::format("'{}' is the output matrix too (model.tie_embeddings), and folders of "
                       "adapters cannot hold such a module; leave it out, or train by patterns",
                       tokens->name));
  }
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (!tensor.name.ends_with(".lora_A.weight")) continue;
      const std::string_view module = module_of(tensor).substr(0, module_of(tensor).rfind('.'));
      const TensorSpec* const weight = block.find(std::string(module) + ".weight");
      if (weight == nullptr || weight->frozen) continue;
      refuse("modules_to_save",
             fmt::format("'{}' would be trained in full, but it is a target too; remove one",
                         weight->name));
    }
  }
}

}  // namespace

const TensorSpec& map_of_magnitudes(const BlockSpec& block, const TensorSpec& tensor) {
  expects(tensor.name.ends_with(kMagnitude), "the tensor is not one of magnitudes");
  const std::string module = tensor.name.substr(0, tensor.name.size() - kMagnitude.size());
  return block.tensor(module + std::string(kWeight));
}

void adapt(Architecture& model, AdapterConfig wanted, const Refuse& refuse) {
  if (model.config.layer_tiles > 1) {
    refuse("targets", "layers in tiles do not support adapters; set model.layer_tiles to 1");
  }
  if (wanted.targets.empty()) {
    refuse("targets", fmt::format("missing; give names of linear maps ({}), or \"{}\" for all",
                                  listed(adaptable_names(model)), kAllLinear));
  }
  const bool plain = wanted.targets == std::vector<std::string>{std::string(kAllLinear)};
  if (plain) {
    wanted.targets = adaptable_names(model);
  } else {
    for (const std::string& target : wanted.targets) check_target(model, target, refuse);
  }
  if (wanted.dora && wanted.dropout > 0.0) {
    refuse("dora",
           fmt::format(
               "is true, but dropout is {}; DoRA does not support dropout, so set dropout to 0",
               wanted.dropout));
  }
  for (BlockSpec& block : model.blocks) {
    if (block.kind != BlockKind::layer) continue;
    wanted.input_first = model.layer(block.layer).input_first;
    add_adapters(model, block, wanted, plain);
  }
  complete_expert_adapters(model, wanted, refuse);
  check_patterns(model, wanted, refuse);
  std::vector<std::string> patterns = {"*.lora_A.weight", "*.lora_B.weight"};
  if (wanted.dora) patterns.push_back("*" + std::string(kMagnitude));
  const std::size_t of_adapters = patterns.size();
  for (const std::string& module : wanted.modules_to_save) patterns.push_back(pattern_of(module));
  freeze(model, patterns, [&](std::size_t pattern, const std::string& /*rule*/) {
    const std::string& module = wanted.modules_to_save[pattern - of_adapters];
    refuse(fmt::format("modules_to_save[{}]", pattern - of_adapters),
           fmt::format("'{}' matches no module of the model{}", module,
                       did_you_mean(module, module_names(model))));
  });
  check_saved(model, refuse);
  model.adapters = std::move(wanted);
}

std::string Quantization::description() const {
  if (format == Format::int8) return "int8";
  return double_scales ? "nf4 with scales in 8 bits" : "nf4";
}

QuantizedArrays::QuantizedArrays(const Quantization& quantization, Elems count) : elements(count) {
  const bool nf4 = quantization.format == Quantization::Format::nf4;
  scales_count = (elements + quantization.block() - 1) / quantization.block();
  nested_count = quantization.double_scales ? (scales_count + kNestedBlock - 1) / kNestedBlock : 0;
  scales = round_up(nf4 ? (elements + 1) / 2 : elements, kCacheLine);
  nested = scales + round_up(scales_count * (nested_count > 0 ? 1 : sizeof(float)), kCacheLine);
  mean = nested + round_up(nested_count * sizeof(float), kCacheLine);
  bytes = mean + (nested_count > 0 ? kCacheLine : 0);
}

namespace {

/// A linear map. Names of maps in stacks of experts do not end with ".weight". Transposed stacks,
/// those of gpt-oss, stay in the training type.
bool is_map(const BlockSpec& block, const TensorSpec& tensor) {
  if (is_layer_experts(tensor)) return true;
  const bool of_stack = block.content == BlockContent::expert && !tensor.stored.as_columns;
  return tensor.shape.size() == 2 && (of_stack || tensor.name.ends_with(".weight"));
}

/// A frozen linear map of a layer, except a router's.
bool can_be_quantized(const BlockSpec& block, const TensorSpec& tensor) {
  return tensor.frozen && block.kind == BlockKind::layer && is_map(block, tensor) &&
         block.content != BlockContent::router && !is_layer_router(tensor) && !tensor.table &&
         !is_shared_gate(block, tensor);
}

}  // namespace

void quantize(Architecture& model, const Quantization& how,
              const std::function<void(const std::string& rule)>& refuse) {
  if (model.config.layer_tiles > 1) {
    refuse("quantised layers cannot be cut into tiles; set model.layer_tiles to 1");
  }
  bool found = false;
  for (BlockSpec& block : model.blocks) {
    bool any = false;
    for (TensorSpec& tensor : block.tensors) {
      tensor.quantized = can_be_quantized(block, tensor);
      any = any || tensor.quantized;
    }
    if (any && block.pieces > 1) {
      refuse(
          "expert parallelism does not support quantised experts; set ballast.expert_parallel to "
          "1");
    }
    if (any) arrange(block);
    found = found || any;
  }
  if (!found) {
    refuse(
        "there are no frozen matrices to quantise; set ballast.train to \"adapters\" or to "
        "patterns of trained tensors");
  }
  model.quantization = how;
}

BlockCodes::BlockCodes(const Architecture& model, const BlockSpec& block) {
  if (block.quantized_elements == 0) return;
  for (const TensorSpec& tensor : block.tensors) {
    if (!tensor.quantized) continue;
    matrices.push_back({&tensor, bytes, QuantizedArrays(*model.quantization, tensor.size)});
    bytes += matrices.back().arrays.bytes;
  }
  bytes = round_up(bytes, kPage);
}

}  // namespace ballast::model
