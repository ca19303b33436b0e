#include <algorithm>
#include <array>
#include <set>

#include <fmt/format.h>
#include <fnmatch.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"

namespace ballast::model {
namespace {

bool matches(const std::string& pattern, const TensorSpec& tensor) {
  return fnmatch(pattern.c_str(), tensor.name.c_str(), 0) == 0;
}

/// Patterns for the words by which transformers' Trainer exempts tensors, and for GPT-2's
/// LayerNorms, which it exempts by their class. The names of other families' LayerNorms contain
/// such words.
constexpr std::array kBiasesAndNorms = {"*bias*",   "*layernorm*", "*rmsnorm*", "norm.*",
                                        "*.norm.*", "*_norm.*",    "*.ln_?.*"};

bool is_exempt(const std::string& pattern, const TensorSpec& tensor) {
  if (pattern != kTransformersExempt) return matches(pattern, tensor);
  return std::any_of(kBiasesAndNorms.begin(), kBiasesAndNorms.end(),
                     [&](const char* words) { return matches(words, tensor); });
}

/// Candidates for a mistyped pattern: names of tensors, and patterns for all tensors whose names
/// begin alike.
std::vector<std::string> possible_patterns(const Architecture& model) {
  std::set<std::string> all;
  for (const BlockSpec& block : model.blocks) {
    for (const TensorSpec& tensor : block.tensors) {
      if (tensor.buffer) continue;
      all.insert(tensor.name);
      for (std::size_t dot = tensor.name.find('.'); dot != std::string::npos;
           dot = tensor.name.find('.', dot + 1)) {
        const std::string_view name = tensor.name;
        all.insert(fmt::format("{}*", name.substr(0, dot + 1)));
        all.insert(fmt::format("*{}", name.substr(dot)));
      }
    }
  }
  return {all.begin(), all.end()};
}

/// Returns advice on a pattern for stacks of experts that the model has one by one; "" for others.
std::string_view advice_on_stacks(const std::string& pattern, const Architecture& model) {
  const bool stack = pattern.find("experts.gate_up_proj") != std::string::npos ||
                     pattern.find("experts.down_proj") != std::string::npos;
  const bool separate = std::ranges::any_of(model.blocks, [](const BlockSpec& block) {
    return block.content == BlockContent::expert && block.tensors.front().stored.stacked == 0;
  });
  if (!stack || !separate) return "";
  return "; experts that a folder stacks have their own names: \"*.experts.*.down_proj.weight\" is "
         "for those of all experts, \"*.experts.0.*\" for all maps of the first one";
}

/// Returns why a pattern matches nothing that can be trained.
std::string unmatched(const std::string& pattern, const Architecture& model) {
  for (const BlockSpec& block : model.blocks) {
    const auto matched = std::ranges::find_if(
        block.tensors, [&](const TensorSpec& tensor) { return matches(pattern, tensor); });
    if (matched == block.tensors.end()) continue;
    return fmt::format("'{}' matches only {}, which has no gradient; remove it{}", pattern,
                       matched->name,
                       block.content == BlockContent::router
                           ? ", and set model.router_bias_update_speed to move correction biases"
                           : "");
  }
  const std::string advice(advice_on_stacks(pattern, model));
  return fmt::format("'{}' matches no tensor of the model{}", pattern,
                     advice.empty() ? did_you_mean(pattern, possible_patterns(model)) : advice);
}

/// Returns whether only some of the block's tensors are trained.
bool is_mixed(const BlockSpec& block) {
  return std::any_of(block.tensors.begin(), block.tensors.end(), [&](const TensorSpec& tensor) {
    return tensor.frozen != block.tensors.front().frozen;
  });
}

}  // namespace

void arrange(BlockSpec& block) {
  if (block.pieces > 1) {
    block.frozen_elements = block.tensors.front().frozen ? block.elements : 0;
    return;
  }
  const auto frozen =
      std::stable_partition(block.tensors.begin(), block.tensors.end(),
                            [](const TensorSpec& tensor) { return !tensor.frozen; });
  const auto quantized = std::stable_partition(
      frozen, block.tensors.end(), [](const TensorSpec& tensor) { return !tensor.quantized; });
  Elems end = 0;
  Elems trained = 0;
  Elems plain = 0;
  for (auto tensor = block.tensors.begin(); tensor != block.tensors.end(); ++tensor) {
    if (tensor == frozen) end = trained = round_up(end, kBlockStep);
    if (tensor == quantized) end = plain = round_up(end, kBlockStep);
    tensor->offset = end;
    end += round_up(tensor->size, kTensorStep);
  }
  // Tiles keep the size of the largest.
  block.elements = std::max(block.elements, round_up(end, kBlockStep));
  if (frozen != block.tensors.end()) block.frozen_elements = block.elements - trained;
  if (quantized != block.tensors.end()) block.quantized_elements = block.elements - plain;
}

void freeze(Architecture& model, std::span<const std::string> patterns,
            const std::function<void(std::size_t, const std::string&)>& refuse) {
  if (patterns.empty()) return;
  std::vector<bool> used(patterns.size(), false);
  bool tied_frozen = false;
  for (BlockSpec& block : model.blocks) {
    for (TensorSpec& tensor : block.tensors) {
      tensor.frozen = true;
      for (std::size_t p = 0; p < patterns.size(); ++p) {
        if (tensor.buffer || !matches(patterns[p], tensor)) continue;
        tensor.frozen = false;
        used[p] = true;
      }
      if (!tensor.frozen) continue;
      const bool output = block.kind == BlockKind::head && tensor.name == model.outer.output;
      const bool map = block.kind == BlockKind::layer && tensor.shape.size() == 2 && !tensor.table;
      if (output || map) block.frozen_product_elements += tensor.size;
      tied_frozen = tied_frozen || tensor.name == model.outer.tokens;
    }
    arrange(block);
    if (block.pieces == 1 || !is_mixed(block)) continue;
    const bool experts = block.content == BlockContent::expert;
    throw Error(ErrorCategory::config,
                fmt::format("{}: only some tensors of '{}' are trained; train all tensors of {} or "
                            "none, or set it to 1",
                            experts ? "ballast.expert_parallel" : "tensor_parallel.autotp_size",
                            block.name, experts ? "experts" : "a tile"));
  }
  if (model.config.tie_embeddings && tied_frozen) {
    BlockSpec& head = model.blocks[model.head()];
    head.frozen_product_elements = head.product_elements;
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  if (unused == used.end()) return;
  const auto number = static_cast<std::size_t>(unused - used.begin());
  refuse(number, unmatched(patterns[number], model));
}

void exempt_from_decay(Architecture& model, std::span<const std::string> patterns,
                       const std::function<void(std::size_t, const std::string&)>& refuse) {
  for (std::size_t p = 0; p < patterns.size(); ++p) {
    bool used = patterns[p] == kTransformersExempt;
    for (BlockSpec& block : model.blocks) {
      for (TensorSpec& tensor : block.tensors) {
        if (!is_exempt(patterns[p], tensor)) continue;
        tensor.undecayed = true;
        used = true;
      }
    }
    if (!used) refuse(p, unmatched(patterns[p], model));
  }
}

double Architecture::frozen_flops(std::size_t index, std::uint64_t sequences,
                                  std::uint64_t length) const {
  const BlockSpec& block = blocks.at(index);
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  return 2.0 * block.token_share * tokens *
             (static_cast<double>(block.frozen_product_elements) -
              static_cast<double>(block.repeated_product_elements)) +
         2.0 * static_cast<double>(block.norm_product_elements);
}

Elems Architecture::trained_parameters() const {
  Elems sum = 0;
  for (const BlockSpec& block : blocks) {
    for (const TensorSpec& tensor : block.tensors) sum += tensor.frozen ? 0 : tensor.size;
  }
  return sum;
}

std::size_t Architecture::first_differentiated() const {
  std::size_t first = 0;
  while (first + 1 < blocks.size() && blocks[first].trained_elements() == 0) ++first;
  if (blocks[first].kind == BlockKind::embedding) return 0;
  if (blocks[first].kind == BlockKind::head) return head();
  while (first > 0 && blocks[first - 1].kind == BlockKind::layer &&
         blocks[first - 1].layer == blocks[first].layer) {
    --first;
  }
  return first;
}

Architecture build_trained(const ModelConfig& config, const RankSplit& split,
                           const TrainedParts& parts, const Refuse& refuse) {
  Architecture model = build_architecture(config, split);
  const auto refuse_in = [&refuse](const char* list) {
    return [&refuse, list](std::size_t pattern, const std::string& rule) {
      refuse(fmt::format("{}[{}]", list, pattern), rule);
    };
  };
  if (parts.adapters) {
    adapt(model, *parts.adapters, [&](std::string_view key, const std::string& rule) {
      refuse(fmt::format("adapters.{}", key), rule);
    });
  } else {
    freeze(model, parts.train, refuse_in("train"));
  }
  exempt_from_decay(model, parts.weight_decay_exclude, refuse_in("weight_decay_exclude"));
  if (parts.quantized_base) {
    quantize(model, *parts.quantized_base,
             [&](const std::string& rule) { refuse("quantized_base", rule); });
  }
  return model;
}

}  // namespace ballast::model
