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

/// Matches like a list of target_modules in PEFT.
bool names(std::string_view target, std::string_view module) {
  if (!module.ends_with(target)) return false;
  const std::size_t before = module.size() - target.size();
  return before == 0 || module[before - 1] == '.';
}

/// Returns whether the tensor is a linear map of attention or of an MLP.
bool can_be_adapted(const BlockSpec& block, const TensorSpec& tensor) {
  const bool map = tensor.shape.size() == 2 && tensor.name.ends_with(kWeight);
  return map && !tensor.table && !is_layer_router(tensor) && block.kind == BlockKind::layer &&
         (block.content == BlockContent::whole || block.content == BlockContent::attention_half);
}

/// Describes a tensor that cannot be adapted.
std::string_view kind_of(const BlockSpec& block, const TensorSpec& tensor) {
  if (tensor.shape.size() == 1) return "a norm";
  if (block.kind == BlockKind::embedding) return "the embedding";
  if (tensor.table) return "an embedding";
  if (block.kind == BlockKind::head) return "the output matrix";
  if (block.content == BlockContent::router || is_layer_router(tensor)) return "a router";
  return "a map of experts";
}

/// Last parts of the names of all maps that can be adapted, in the order of the model.
std::vector<std::string> adaptable_names(const Architecture& model) {
  std::vector<std::string> found;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      std::string name = last_part(module_of(tensor));
      const bool known = std::find(found.begin(), found.end(), name) != found.end();
      if (can_be_adapted(block, tensor) && !known) found.push_back(std::move(name));
    }
  }
  return found;
}

/// Calls `refuse` unless `target` matches maps that can be adapted, and nothing else.
void check_target(const Architecture& model, const std::string& target, const Refuse& refuse) {
  const std::vector<std::string> possible = adaptable_names(model);
  bool found = false;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (!names(target, module_of(tensor))) continue;
      found = true;
      if (can_be_adapted(block, tensor) || tensor.name.ends_with(".bias")) continue;
      refuse("targets", fmt::format("'{}' is {}; adapters are for linear maps of attention and of "
                                    "MLPs: {}{}",
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

/// Adds A, B and, with DoRA, the magnitudes of the map `weight`. The backward pass recomputes A x.
void add_adapter(BlockSpec& block, const TensorSpec& weight, const AdapterConfig& wanted,
                 bool last) {
  const std::string module(module_of(weight));
  const std::uint64_t rank = wanted.rank_of(module);
  const std::uint64_t in = weight.shape[wanted.input_first ? 0 : 1];
  const std::uint64_t out = weight.shape[wanted.input_first ? 1 : 0];
  add_tensor(block, {.name = module + ".lora_A.weight",
                     .shape = {rank, in},
                     .init = Init::uniform,
                     .stddev = 1.0 / std::sqrt(static_cast<double>(in)),
                     .adapter_scale = wanted.scale_of(module)});
  // B has the rows of the map.
  add_tensor(block, {.name = module + ".lora_B.weight",
                     .shape = {out, rank},
                     .stored = wanted.input_first ? StoredRows() : weight.stored});
  block.repeated_product_elements += rank * in;
  block.adapter_values += values_of_adapter(in, out, wanted.dropout > 0.0, last);
  if (last) block.last_product_elements += rank * (in + out);
  if (!wanted.dora) return;
  add_tensor(block, {.name = module + std::string(kMagnitude),
                     .shape = {out},
                     .init = Init::row_norms,
                     .stored = wanted.input_first ? StoredRows() : weight.stored});
  // The gradient of a magnitude needs the map's result, which is recomputed.
  block.repeated_product_elements += out * (in + rank);
  block.norm_elements += in * out;
  block.norm_product_elements += rank * in * (out + rank);
}

void add_adapters(BlockSpec& block, const AdapterConfig& wanted) {
  std::vector<TensorSpec> maps;
  for (const TensorSpec& tensor : block.tensors) {
    if (can_be_adapted(block, tensor)) maps.push_back(tensor);
  }
  const bool ends_with_map = block.last_product_elements > 0;
  for (std::size_t m = 0; m < maps.size(); ++m) {
    const bool target =
        std::any_of(wanted.targets.begin(), wanted.targets.end(),
                    [&](const std::string& name) { return names(name, module_of(maps[m])); });
    if (!target) continue;
    add_adapter(block, maps[m], wanted, ends_with_map && m + 1 == maps.size());
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
  if (wanted.targets == std::vector<std::string>{std::string(kAllLinear)}) {
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
    add_adapters(block, wanted);
  }
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

/// The gate of a shared expert: a map to one number, which like a router decides how much each
/// token uses the expert.
bool is_shared_gate(const BlockSpec& block, const TensorSpec& tensor) {
  return block.content == BlockContent::shared_expert && tensor.shape.front() == 1;
}

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
