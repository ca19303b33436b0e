#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/gradient_stats.h"
#include "ballast/engine/blueprint.h"

#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

/// Whether a block is a tile of the same embedding, head or half of a layer as the one before it.
bool continues(const model::Architecture& model, std::size_t block) {
  const model::BlockKind kind = model.blocks[block].kind;
  if (kind == model::BlockKind::layer) return model.is_layer_tile(block);
  return model.blocks[block - 1].kind == kind;
}

/// Whether a block is the norm between the halves of a layer.
bool begins_second_half(const model::Architecture& model, std::size_t block) {
  const model::BlockSpec& spec = model.blocks[block];
  return spec.part == model::LayerPart::norm && model.is_layer_tile(block - 1) &&
         model.blocks[block - 1].layer == spec.layer;
}

/// Of a block's weights as they are kept.
Bytes stored_bytes(const Blueprint& blueprint, std::size_t block) {
  const model::BlockSpec& spec = blueprint.model.blocks[block];
  return spec.plain_elements() * size_of(blueprint.type) +
         model::BlockCodes(blueprint.model, spec).bytes;
}

/// Adds the sizes of the blocks, with this rank's part of the states.
void add_blocks(Blueprint& blueprint, const model::KernelSizes& kernels,
                std::uint64_t persistence_threshold) {
  const auto of_block = [&](const std::vector<Bytes>& sizes, std::size_t block) {
    expects(sizes.empty() || sizes.size() == blueprint.model.blocks.size(),
            "blueprint: the kernel memory belongs to another model");
    return sizes.empty() ? 0 : sizes[block];
  };
  step::Workload& work = blueprint.workload;
  work.first_differentiated = static_cast<std::uint32_t>(blueprint.model.first_differentiated());
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    const model::BlockSpec& block = blueprint.model.blocks[b];
    const Bytes all_bytes = block.elements * size_of(blueprint.type);
    const bool coded = block.coded_elements > 0;
    work.blocks.push_back({.name = block.name,
                           .weight_bytes = stored_bytes(blueprint, b) / block.experts,
                           .decoded_bytes = coded ? all_bytes : 0,
                           .accumulator_bytes = block.own_trained_elements() * size_of(DType::f32),
                           .gradient_bytes = block.own_trained_elements() * size_of(blueprint.type),
                           .forward_flops = blueprint.model.forward_flops(
                               b, blueprint.shape.sequences, blueprint.shape.length),
                           .recomputed_flops = blueprint.model.recomputed_flops(
                               b, blueprint.shape.sequences, blueprint.shape.length),
                           .frozen_flops = blueprint.model.frozen_flops(
                               b, blueprint.shape.sequences, blueprint.shape.length),
                           .norm_traffic = 2 * block.norm_elements * size_of(blueprint.type),
                           .continues = b > 0 && continues(blueprint.model, b),
                           .mid_layer = begins_second_half(blueprint.model, b),
                           .routes = block.part == model::LayerPart::router,
                           .is_expert = block.part == model::LayerPart::expert,
                           .token_share = block.token_share,
                           .expert_parallel = block.experts > 1,
                           .keeps_whole = block.parameters <= persistence_threshold || coded ||
                                          block.trained_elements() % block.elements > 0,
                           .intermediate_bytes = of_block(kernels.intermediates, b),
                           .cleared_bytes = of_block(kernels.cleared, b)});
    for (std::uint32_t group = 0; group < sub_groups(blueprint, b); ++group) {
      const StateLayout states = state_layout(blueprint, b, group);
      work.blocks.back().sub_groups.push_back(
          {.state_bytes = states.state_bytes,
           .initial_state_bytes = states.master.offset + states.master.bytes,
           .update_traffic = states.update_traffic});
    }
  }
}

void add_batch(Blueprint& blueprint, const model::KernelSizes& kernels,
               std::uint64_t evaluation_micro_batches) {
  step::Workload& work = blueprint.workload;
  const std::uint64_t tokens = blueprint.shape.tokens();
  const std::uint64_t width = blueprint.model.config.hidden_size;
  work.activation_bytes = tokens * width * size_of(blueprint.type);
  work.batch_bytes = (work.packed ? 3 : 2) * tokens * sizeof(std::int32_t);
  if (blueprint.pairs) {
    work.pairs_bytes = blueprint.shape.sequences * sizeof(double) + tokens * sizeof(float);
  }
  const std::uint64_t losses = blueprint.head_losses() + (kernels.experts > 0 ? kRouterLosses : 0);
  work.losses_bytes = blueprint.micro_batches * losses * sizeof(double);
  if (kernels.experts > 0) {
    // Ranks gather whole pages.
    work.routing_bytes =
        round_up((kernels.experts + 1) * sizeof(std::int32_t), work.world > 1 ? kPage : kCacheLine);
    work.router_totals_bytes = kernels.router_totals * sizeof(double);
  }
  work.statistics_bytes = sizeof(GradientStats);
  work.micro_batch_tokens = tokens;
  work.micro_batches = static_cast<std::uint32_t>(blueprint.micro_batches);
  work.evaluation_micro_batches = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(evaluation_micro_batches, 1, blueprint.micro_batches));
  work.tied = blueprint.model.config.tie_embeddings;
  work.vocabulary_tiles = static_cast<std::uint32_t>(blueprint.model.config.vocabulary_tiles);
  const auto* const table = blueprint.model.blocks.front().find(blueprint.model.outer.tokens);
  if (work.tied && (table == nullptr || !table->frozen)) {
    work.tied_accumulator_bytes = blueprint.model.largest_tile() * width * size_of(DType::f32);
  }
  if (work.vocabulary_tiles > 1 || work.cuts_layers()) {
    work.rows_bytes = kernels.rows;
    work.row_sums_bytes = tokens * width * size_of(DType::f32);
  }
}

/// Element ranges of the trained tensors that are exempt, each with its padding, which is zero.
std::vector<ElementRange> undecayed_elements(const model::Architecture& model) {
  std::vector<ElementRange> ranges;
  Elems start = 0;
  for (const model::BlockSpec& block : model.blocks) {
    std::vector<ElementRange> own;
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!tensor.undecayed || tensor.frozen) continue;
      const Elems end = tensor.offset + round_up(tensor.size, cpu_adam::Shard::kDecayStep);
      own.push_back({start + tensor.offset, start + end});
    }
    std::ranges::sort(own, {}, &ElementRange::first);
    ranges.insert(ranges.end(), own.begin(), own.end());
    start += round_up(block.elements, cpu_adam::Codes::kBlock);
  }
  return ranges;
}

/// Describes gathers of split weights in 8 bits or among fewer than all ranks; "" otherwise.
std::string describe_gathers(const Blueprint& blueprint) {
  const step::Workload& work = blueprint.workload;
  if (work.world == 1 || work.stage < 3) return "";
  std::string text;
  if (work.weight_ranks > 0 && work.weight_ranks < work.world) {
    text = fmt::format("among {} of {} ranks", work.weight_ranks, work.world);
  }
  if (work.coded_weight > 0) {
    text += fmt::format("{}in 8 bits; results differ from those with gathers in {}",
                        text.empty() ? "" : ", ", to_string(blueprint.type));
  }
  return text;
}

/// "3 of 5 blocks" that are updated before the norm is known; "" if none.
std::string describe_speculation(const Blueprint& blueprint) {
  const auto& blocks = blueprint.workload.blocks;
  std::size_t count = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    count += !blocks[b].is_frozen() && blueprint.placement.blocks[b].speculates ? 1 : 0;
  }
  if (count == 0) return "";
  return fmt::format("of {} of {} blocks before the norm is known, repeated if it clips", count,
                     blocks.size());
}

/// What is trained, if something is frozen; else "".
std::string describe_trained(const Blueprint& blueprint) {
  const Elems trained = blueprint.model.trained_parameters();
  const Elems all = blueprint.model.parameters();
  if (trained == all) return "";
  const auto& adapters = blueprint.model.adapters;
  return fmt::format("{}{:.3g}% of the parameters; the backward pass ends with {}",
                     adapters ? fmt::format("adapters of {}; ", adapters->description()) : "",
                     100.0 * static_cast<double>(trained) / static_cast<double>(all),
                     blueprint.workload.blocks[blueprint.workload.first_differentiated].name);
}

/// Describes what weight decay leaves out; "" without weight decay, or if it leaves out nothing.
std::string describe_decay(const Blueprint& blueprint) {
  std::size_t all = 0;
  std::size_t exempt = 0;
  for (const model::BlockSpec& block : blueprint.model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      all += tensor.frozen ? 0 : 1;
      exempt += tensor.frozen || !tensor.undecayed ? 0 : 1;
    }
  }
  return exempt == 0 ? "" : fmt::format("not for {} of {} trained tensors", exempt, all);
}

/// The format of a quantised base and the bytes of its blocks; "" without one.
std::string describe_base(const Blueprint& blueprint) {
  if (!blueprint.model.quantization) return "";
  Bytes kept = 0;
  Bytes decoded = 0;
  for (const step::BlockWork& block : blueprint.workload.blocks) {
    kept += block.is_coded() ? block.weight_bytes : 0;
    decoded += block.decoded_bytes;
  }
  return fmt::format("{}: {} for layers instead of {}", blueprint.model.quantization->description(),
                     format_bytes(kept), format_bytes(decoded));
}

/// Empty for a model without layers.
std::string describe_kept(const Blueprint& blueprint) {
  const step::Workload& work = blueprint.workload;
  std::size_t layers = 0;
  std::size_t kept = 0;
  for (std::size_t b = work.first_layer(); b < work.head(); ++b) {
    if (!work.has_intermediates(b)) continue;
    ++layers;
    kept += blueprint.placement.blocks[b].keeps_intermediates ? 1 : 0;
  }
  if (layers == 0) return "";
  const auto routes = [](const step::BlockWork& block) { return block.routes; };
  const bool experts = std::any_of(work.blocks.begin(), work.blocks.end(), routes);
  const std::string_view what = experts              ? " (of layers with experts: attention)"
                                : work.cuts_layers() ? " (of layers in tiles: what attention adds)"
                                                     : "";
  if (kept == 0) return "recomputed in the backward pass";
  if (kept == layers) return fmt::format("kept on device{}", what);
  return fmt::format("{} layer{} kept on device{}, {} recomputed", kept, kept == 1 ? "" : "s", what,
                     layers - kept);
}

/// How experts differ from other blocks; "" if they do not, or if there are none.
std::string describe_experts(const Blueprint& blueprint) {
  const step::Options& options = blueprint.options;
  std::string text;
  if (blueprint.workload.routing_bytes == 0) return text;
  if (options.expert_updates == step::ExpertUpdates::touched) {
    text = "updated only in steps with tokens; results differ from those of updating all";
  }
  if (options.prefetches_experts) {
    text += fmt::format("{}weights move before the router has chosen", text.empty() ? "" : "; ");
  }
  const std::uint64_t ranks = blueprint.model.expert_ranks;
  if (ranks > 1) {
    text += fmt::format("{}{} ranks share those of a layer; results differ from those without",
                        text.empty() ? "" : "; ", ranks);
  }
  return text;
}

}  // namespace

void size_workload(Blueprint& blueprint, const model::KernelSizes& kernels,
                   std::uint64_t evaluation_micro_batches, std::uint64_t persistence_threshold) {
  blueprint.workload.workspace_bytes = kernels.workspace;
  blueprint.undecayed = undecayed_elements(blueprint.model);
  add_blocks(blueprint, kernels, persistence_threshold);
  add_batch(blueprint, kernels, evaluation_micro_batches);
  const model::StepShape shape = {.micro_batch = blueprint.shape,
                                  .packed = blueprint.workload.packed,
                                  .pairs = blueprint.pairs,
                                  .ranks = blueprint.workload.world};
  step::set_program(blueprint.workload,
                    model::write_program(blueprint.model, blueprint.type, shape, kernels));
}

memory::Ledger make_ledger(const std::vector<plan::Buffer>& buffers) {
  memory::Ledger ledger;
  for (const plan::Buffer& buffer : buffers) {
    ledger.add(buffer.tier, to_string(buffer.kind), round_up(buffer.bytes, kPage));
  }
  return ledger;
}

void place(Blueprint& blueprint, step::Placement placement) {
  blueprint.placement = std::move(placement);
  blueprint.ledger =
      make_ledger(step::list_buffers(blueprint.workload, blueprint.placement, blueprint.options));
  blueprint.ledger.require_fit(blueprint.budgets);
  blueprint.schedule = step::build(blueprint.workload, blueprint.placement, blueprint.options);
}

std::vector<std::string> describe_placement(const Blueprint& blueprint) {
  std::vector<std::string> lines;
  const auto describe = [&](std::string_view what, Tier step::BlockPlacement::*kind) {
    std::array<std::size_t, 3> count{};
    for (std::size_t b = 0; b < blueprint.workload.blocks.size(); ++b) {
      const bool states = kind == &step::BlockPlacement::optimizer;
      const bool inputs = kind == &step::BlockPlacement::activations;
      if (states && blueprint.workload.blocks[b].is_frozen()) continue;
      if (inputs && !blueprint.workload.places_input(b)) continue;
      ++count[static_cast<std::size_t>(blueprint.placement.blocks[b].*kind)];
    }
    std::string text;
    for (const Tier tier : kTiers) {
      const std::size_t blocks = count[static_cast<std::size_t>(tier)];
      if (blocks == 0) continue;
      if (!text.empty()) text += ", ";
      text += fmt::format("{} block{} on {}", blocks, blocks == 1 ? "" : "s", to_string(tier));
    }
    lines.push_back(fmt::format("{:<17} {}", what, text));
  };
  describe("weights", &step::BlockPlacement::weights);
  if (const std::string text = describe_base(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "quantised base", text));
  }
  if (blueprint.options.purpose == step::Purpose::evaluation) return lines;
  if (const std::string text = describe_trained(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "trained", text));
  }
  if (const std::string text = describe_decay(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "weight decay", text));
  }
  describe("optimizer states", &step::BlockPlacement::optimizer);
  if (blueprint.states.moments != cpu_adam::Moments::Format::f32) {
    const bool codes = blueprint.states.moments == cpu_adam::Moments::Format::blockwise8;
    lines.push_back(fmt::format("{:<17} {}; results differ from those with fp32 states", "moments",
                                codes ? "in 8 bits" : "first in bf16"));
  }
  if (const std::string text = describe_gathers(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "weights gathered", text));
  }
  if (const std::string text = describe_speculation(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "updates", text));
  }
  if (const std::string text = describe_experts(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "experts", text));
  }
  describe("activations", &step::BlockPlacement::activations);
  if (const std::string kept = describe_kept(blueprint); !kept.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "intermediates", kept));
  }
  return lines;
}

}  // namespace ballast::engine
