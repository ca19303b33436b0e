#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/architecture.h"
#include "ballast/model/lora.h"

#include "src/model/description/layer_rules.h"
#include "src/model/description/layer_spec.h"

namespace ballast::model {
namespace {

/// Returns the description of the experts to which the block belongs, or nullptr.
const ExpertsSpec* experts_of(const Architecture& model, const BlockSpec& block) {
  return is_of_experts(block) ? model.layer(block.layer).find<ExpertsSpec>() : nullptr;
}

/// Returns the name of a module in the block in transformers' class, with the prefix.
std::string name_in_class(const Architecture& model, const BlockSpec& block,
                          std::string_view module) {
  const ExpertsSpec* const experts = experts_of(model, block);
  if (experts == nullptr || !module.starts_with(block.prefix)) return std::string(module);
  return block.prefix + experts->name_in_class(std::string(module.substr(block.prefix.size())));
}

std::string_view last_part_of(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

/// Returns the module or parameter to which a tensor of an adapter belongs.
std::string_view adapted_by(const TensorSpec& tensor) {
  const std::string_view name = tensor.name;
  return name.substr(0, name.rfind(".lora_"));
}

/// Returns the name that files of PEFT have for a tensor of an adapter. A module with adapters of
/// two parameters is wrapped twice, and the wrapper of the first one is inside.
std::string name_in_files(const Architecture& model, const BlockSpec& block,
                          const TensorSpec& tensor) {
  const std::string module(adapted_by(tensor));
  const std::string rest = tensor.name.substr(module.size());
  for (const StackedMap& map : stacked_maps(model, block)) {
    if (map.name != module) continue;
    const std::string experts = module.substr(0, module.rfind('.'));
    const std::string outer = fmt::format("{}.{}{}", experts, kStackedDown, kFirstOfAdapter);
    const bool inside = module.ends_with(kStackedGateUp) && block.find(outer) != nullptr;
    return experts + (inside ? ".base_layer" : "") + rest;
  }
  if (block.content == BlockContent::expert) return tensor.name;
  return name_in_class(model, block, module) + rest;
}

void check_kind(const BlockSpec& block, const TensorSpec& adapter, const AdapterConfig& wanted,
                const Refuse& refuse) {
  if (wanted.dora || wanted.dropout > 0.0) {
    refuse(wanted.dora ? "dora" : "dropout",
           fmt::format("is {}, but experts and routers support neither DoRA nor dropout; remove "
                       "'{}' from the targets, or set it to {}",
                       wanted.dora ? "true" : fmt::format("{}", wanted.dropout),
                       adapted_by(adapter), wanted.dora ? "false" : "0"));
  }
  if (block.pieces > 1) {
    refuse("targets",
           fmt::format("'{}' is one of several experts of a block; adapters of experts do not "
                       "support expert parallelism, so set ballast.expert_parallel to 1",
                       adapted_by(adapter)));
  }
}

}  // namespace

bool is_shared_gate(const BlockSpec& block, const TensorSpec& tensor) {
  return block.content == BlockContent::shared_expert && tensor.shape.front() == 1;
}

bool is_of_experts(const BlockSpec& block) {
  return block.kind == BlockKind::layer &&
         (block.content == BlockContent::router || block.content == BlockContent::shared_expert ||
          block.content == BlockContent::expert);
}

bool is_map_of_experts(const BlockSpec& block, const TensorSpec& tensor) {
  return is_of_experts(block) && tensor.shape.size() == 2 && tensor.name.ends_with(".weight") &&
         !is_shared_gate(block, tensor);
}

std::vector<StackedMap> stacked_maps(const Architecture& model, const BlockSpec& block) {
  if (block.content != BlockContent::expert) return {};
  const ExpertsSpec& experts = *experts_of(model, block);
  const std::string before = block.prefix + experts.name_in_class(experts.prefix);
  const std::uint64_t hidden = model.config.hidden_size;
  const std::uint64_t wide = experts.width;
  // Earlier versions of PEFT took all parameters for [experts, in, out], as those of `stacked` are.
  StoredRows rows = {.once_exchanged = !experts.stacked};
  StoredRows alternating = rows;
  if (experts.stacked) {
    alternating.parts = 2;
    alternating.groups = wide;
  }
  return {{before + std::string(kStackedGateUp), hidden, 2 * wide, alternating, experts.count},
          {before + std::string(kStackedDown), wide, hidden, rows, experts.count}};
}

bool is_target(std::string_view target, std::string_view module) {
  if (!module.ends_with(target)) return false;
  const std::size_t before = module.size() - target.size();
  return before == 0 || module[before - 1] == '.';
}

bool names_map(std::string_view target, const Architecture& model, const BlockSpec& block,
               std::string_view module) {
  if (is_target(target, module)) return true;
  if (!is_of_experts(block)) return false;
  if (block.content != BlockContent::expert) {
    return is_target(target, name_in_class(model, block, module));
  }
  const std::string number = fmt::format(".experts.{}.", block.expert);
  std::string any(module);
  const std::size_t at = any.find(number);
  if (at == std::string::npos) return false;
  return is_target(target, any.replace(at, number.size(), ".experts.*."));
}

bool names_stack(std::string_view target, const Architecture& model, const BlockSpec& block,
                 const StackedMap& map) {
  if (!is_target(target, map.name)) return false;
  const ExpertsSpec& experts = *experts_of(model, block);
  return target != kStackedDown || experts.stacked || experts.fused;
}

void complete_expert_adapters(Architecture& model, const AdapterConfig& wanted,
                              const Refuse& refuse) {
  for (BlockSpec& block : model.blocks) {
    if (!is_of_experts(block)) continue;
    const TensorSpec* alone = nullptr;
    const TensorSpec* joint = nullptr;
    for (TensorSpec& tensor : block.tensors) {
      if (!tensor.adapter) continue;
      check_kind(block, tensor, wanted, refuse);
      tensor.name_in_files = name_in_files(model, block, tensor);
      (tensor.cuts_rows() || tensor.rows_in_all > tensor.shape.front() ? joint : alone) = &tensor;
    }
    if (alone == nullptr || joint == nullptr) continue;
    refuse("targets",
           fmt::format("'{}' has its own adapter, and '{}' has one for all experts together; "
                       "name all maps of experts alone (\"{}\"), or all together "
                       "(\"experts.{}\", \"experts.{}\")",
                       adapted_by(*alone), adapted_by(*joint), last_part_of(adapted_by(*alone)),
                       kStackedGateUp, kStackedDown));
  }
}

}  // namespace ballast::model
