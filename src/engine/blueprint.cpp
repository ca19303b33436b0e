#include "ballast/engine/blueprint.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/step/problem.h"

namespace ballast::engine {

namespace {

/// Returns the sizes of a block, with this rank's part of the states.
step::BlockSizes sizes_of(const model::Architecture& model, DType type, std::size_t b,
                          std::uint64_t persistence_threshold) {
  const model::BlockSpec& block = model.blocks[b];
  const bool quantized = block.quantized_elements > 0;
  const Bytes stored =
      block.plain_elements() * size_of(type) + model::BlockCodes(model, block).bytes;
  return {.weight_bytes = stored / block.pieces,
          .dequantized_bytes = quantized ? block.elements * size_of(type) : 0,
          .gradient_bytes = block.own_trained_elements() * size_of(type),
          .replicated = block.parameters <= persistence_threshold || quantized ||
                        block.content == model::BlockContent::layer_embedding ||
                        block.trained_elements() % block.elements > 0};
}

/// Sets Blueprint::first_elements and Blueprint::undecayed: the exempt trained tensors, each with
/// its padding, which is zero.
void number_elements(Blueprint& blueprint) {
  blueprint.first_elements.clear();
  std::vector<ElementRange>& ranges = blueprint.undecayed;
  ranges.clear();
  // model::whole_blocks(), without a copy of ten thousands of experts.
  struct Piece {
    std::uint64_t number;
    const model::BlockSpec* block;
    Elems begin;
  };
  std::vector<Piece> pieces;
  for (const model::BlockSpec& block : blueprint.model.blocks) {
    for (std::uint64_t p = 0; p < block.pieces; ++p) {
      pieces.push_back({block.number + p * block.number_step, &block, p * block.own_elements()});
    }
  }
  std::ranges::sort(pieces, {}, &Piece::number);
  Elems start = 0;
  for (const auto& [number, block, begin] : pieces) {
    const Elems elements = block->own_elements();
    blueprint.first_elements.push_back(start);
    std::vector<ElementRange> own;
    for (const model::TensorSpec& tensor : block->tensors) {
      const bool there = tensor.offset >= begin && tensor.offset < begin + elements;
      if (!there || !tensor.undecayed || tensor.frozen) continue;
      const Elems first = start + tensor.offset - begin;
      own.push_back({first, first + round_up(tensor.size, cpu_adam::Shard::kDecayStep)});
    }
    std::ranges::sort(own, {}, &ElementRange::first);
    ranges.insert(ranges.end(), own.begin(), own.end());
    start += round_up(elements, cpu_adam::Codes::kBlock);
  }
}

/// Describes gathers of split weights in 8 bits or among fewer than all ranks; "" otherwise.
std::string describe_gathers(const Blueprint& blueprint) {
  const step::Problem& problem = blueprint.problem;
  if (problem.sharers == 1 || problem.stage < 3) return "";
  std::string text;
  if (problem.hpz_partition_size > 0 && problem.hpz_partition_size < problem.sharers) {
    text = fmt::format("among {} of {} ranks", problem.hpz_partition_size, problem.sharers);
  }
  if (problem.qwz_weight_bytes > 0) {
    text += fmt::format("{}in 8 bits; results differ from those with gathers in {}",
                        text.empty() ? "" : ", ", to_string(blueprint.type));
  }
  return text;
}

/// Describes how many blocks are updated before the norm is known; "" if none.
std::string describe_speculation(const Blueprint& blueprint) {
  const auto& blocks = blueprint.problem.blocks;
  std::size_t count = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    count += !blocks[b].is_frozen() && blueprint.placement.blocks[b].speculates ? 1 : 0;
  }
  if (count == 0) return "";
  return fmt::format("{} of {} blocks speculatively (redone if the step is clipped)", count,
                     blocks.size());
}

/// Describes what is trained if something is frozen; else "".
std::string describe_trained(const Blueprint& blueprint) {
  const Elems trained = blueprint.model.trained_parameters();
  const Elems all = blueprint.model.parameters();
  if (trained == all) return "";
  const auto& adapters = blueprint.model.adapters;
  return fmt::format("{}{:.3g}% of the parameters; the backward pass ends with {}",
                     adapters ? fmt::format("adapters of {}; ", adapters->description()) : "",
                     100.0 * static_cast<double>(trained) / static_cast<double>(all),
                     blueprint.problem.name_of(blueprint.problem.program().first_differentiated));
}

/// Describes the tensors without weight decay; "" without weight decay, or if there are none.
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

/// Returns the format of a quantised base and the size of its blocks; "" without one.
std::string describe_base(const Blueprint& blueprint) {
  if (!blueprint.model.quantization) return "";
  Bytes kept = 0;
  Bytes dequantized = 0;
  for (const step::BlockSizes& block : blueprint.problem.blocks) {
    kept += block.is_quantized() ? block.weight_bytes : 0;
    dequantized += block.dequantized_bytes;
  }
  return fmt::format("{}: {} for layers instead of {}", blueprint.model.quantization->description(),
                     format_bytes(kept), format_bytes(dequantized));
}

/// Returns "" for a model without layers.
std::string describe_kept(const Blueprint& blueprint) {
  std::size_t layers = 0;
  std::size_t kept = 0;
  std::size_t attention = 0;
  for (std::size_t b = 0; b < blueprint.problem.blocks.size(); ++b) {
    if (!blueprint.problem.index->keeps_intermediates(b)) continue;
    ++layers;
    const step::Kept keeps = blueprint.placement.blocks[b].kept;
    kept += keeps == step::Kept::all ? 1 : 0;
    attention += keeps == step::Kept::attention ? 1 : 0;
  }
  if (layers == 0) return "";
  const auto has_content = [&](model::BlockContent content) {
    return std::ranges::any_of(blueprint.model.blocks, [content](const model::BlockSpec& block) {
      return block.content == content;
    });
  };
  const std::string_view what =
      has_content(model::BlockContent::router) ? " (layers with experts: only attention)"
      : has_content(model::BlockContent::norm) ? " (layers in tiles: only the output of attention)"
                                               : "";
  const auto count = [](std::size_t number) {
    return fmt::format("{} layer{}", number, number == 1 ? "" : "s");
  };
  if (attention > 0) {
    std::string text = kept > 0 ? count(kept) + " kept, " : "";
    text += count(attention) + " recomputed except attention";
    const std::size_t rest = layers - kept - attention;
    return rest == 0 ? text : fmt::format("{}, {} recomputed", text, rest);
  }
  if (kept == 0) return "recomputed in the backward pass";
  if (kept == layers) return fmt::format("kept on device{}", what);
  return fmt::format("{} layer{} kept on device{}, {} recomputed", kept, kept == 1 ? "" : "s", what,
                     layers - kept);
}

/// Describes the differences between experts and other blocks; "" if there are none.
std::string describe_experts(const Blueprint& blueprint) {
  const step::Options& options = blueprint.options;
  std::string text;
  if (blueprint.problem.index->routing_bytes() == 0) return text;
  if (options.expert_updates == step::ExpertUpdates::active) {
    text = "updated only in steps with tokens; results differ from updating all";
  }
  if (options.prefetches_experts) {
    text += fmt::format("{}weights are prefetched before the router has chosen",
                        text.empty() ? "" : "; ");
  }
  const std::uint64_t ranks = blueprint.model.split.experts;
  if (ranks > 1) {
    text +=
        fmt::format("{}{} ranks share the experts of a layer; results differ from those without",
                    text.empty() ? "" : "; ", ranks);
  }
  return text;
}

/// Returns the device memory of the largest sum over the tiles of all tensor places: 0 without
/// tensor parallelism.
Bytes sum_scratch(const Blueprint& blueprint) {
  const model::ModelConfig& config = blueprint.model.config;
  const std::uint64_t places = blueprint.mesh.tensor;
  if (places == 1) return 0;
  const comm::OrderedSum sum = {
      .elements = blueprint.shape.tokens() * config.hidden_size,
      .terms = static_cast<std::uint32_t>(std::max(config.layer_tiles, config.vocabulary_tiles) /
                                          places)};
  return sum.scratch(blueprint.mesh.tensor);
}

}  // namespace

void size_problem(Blueprint& blueprint, const model::KernelSizes& kernels,
                  std::uint64_t evaluation_micro_batches, std::uint64_t persistence_threshold) {
  const model::Architecture& model = blueprint.model;
  if (model.split.tensor > 1) {
    blueprint.tiles = std::make_shared<const model::Architecture>(
        model::at_tensor_place(model, blueprint.mesh.tensor_place()));
  }
  number_elements(blueprint);
  step::Problem& problem = blueprint.problem;
  const model::StepShape shape = {.micro_batch = blueprint.shape,
                                  .micro_batches = blueprint.micro_batches,
                                  .packed = blueprint.packed,
                                  .pairs = blueprint.pairs,
                                  .ranks = problem.sharers,
                                  .router_losses = blueprint.router_losses,
                                  .sum_scratch = sum_scratch(blueprint)};
  problem.index = std::make_shared<const step::ProgramIndex>(
      model::write_program(model, blueprint.type, shape, kernels));
  problem.statistics_bytes = sizeof(GradientStats);
  problem.workspace_bytes = kernels.workspace;
  problem.micro_batch_tokens = blueprint.shape.tokens();
  problem.micro_batches = static_cast<std::uint32_t>(blueprint.micro_batches);
  problem.evaluation_micro_batches = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(evaluation_micro_batches, 1, blueprint.micro_batches));
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    problem.blocks.push_back(sizes_of(model, blueprint.type, b, persistence_threshold));
    // The parts of the ranks are derived from the sizes.
    for (std::uint32_t group = 0; group < sub_groups(blueprint, b); ++group) {
      const StateLayout states = state_layout(blueprint, b, group);
      problem.blocks[b].sub_groups.push_back(
          {.state_bytes = states.state_bytes,
           .initial_state_bytes = states.master.offset + states.master.bytes,
           .update_traffic = states.update_traffic});
    }
  }
}

memory::Ledger make_ledger(const std::vector<plan::Buffer>& buffers) {
  memory::Ledger ledger;
  for (const plan::Buffer& buffer : buffers) {
    // Devices share one budget of host memory.
    const std::uint8_t device = buffer.tier == Tier::device ? buffer.device : std::uint8_t{0};
    ledger.add(buffer.tier, to_string(buffer.kind), round_up(buffer.bytes, kPage), device);
  }
  return ledger;
}

void place(Blueprint& blueprint, step::Placement placement) {
  blueprint.placement = std::move(placement);
  blueprint.ledger =
      make_ledger(step::list_buffers(blueprint.problem, blueprint.placement, blueprint.options));
  blueprint.ledger.require_fit(blueprint.budgets);
  blueprint.schedule = step::build(blueprint.problem, blueprint.placement, blueprint.options);
}

std::vector<std::string> describe_placement(const Blueprint& blueprint) {
  std::vector<std::string> lines;
  const auto describe = [&](std::string_view what, Tier step::BlockPlacement::*kind) {
    std::array<std::size_t, 3> count{};
    for (std::size_t b = 0; b < blueprint.problem.blocks.size(); ++b) {
      const bool states = kind == &step::BlockPlacement::optimizer;
      const bool inputs = kind == &step::BlockPlacement::activations;
      if (states && blueprint.problem.blocks[b].is_frozen()) continue;
      if (inputs && !blueprint.problem.index->places_input(b)) continue;
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
  if (blueprint.options.order == step::Order::micro_batch_major_offload) {
    lines.push_back(fmt::format("{:<17} {}", "gradient sums", "on host between two micro-batches"));
  }
  return lines;
}

namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;

/// Allocates consecutive arrays.
class Places {
 public:
  StateArray take(Bytes bytes) {
    if (bytes == 0) return {};
    const Bytes offset = round_up(end_, kCacheLine) + cpu_adam::kArraySkew;
    end_ = offset + bytes;
    return {offset, bytes};
  }
  [[nodiscard]] Bytes end() const { return end_; }

 private:
  Bytes end_ = 0;
};

/// Rounds a maximum size of sub-groups down to whole units.
Elems whole_units(Elems size) {
  static_assert(kSubGroupUnit % Codes::kBlock == 0);
  return std::max<Elems>(1, size / kSubGroupUnit) * kSubGroupUnit;
}

/// Returns null if the array is not kept.
template <class T = void>
T* array_in(std::byte* states, const StateArray& array) {
  return states == nullptr || array.bytes == 0 ? nullptr
                                               : reinterpret_cast<T*>(states + array.offset);
}

/// Returns the `ranges` that overlap [first, end).
std::span<const ElementRange> ranges_in(std::span<const ElementRange> ranges, Elems first,
                                        Elems end) {
  const auto from = std::ranges::upper_bound(ranges, first, {}, &ElementRange::end);
  const auto to = std::ranges::lower_bound(ranges, end, {}, &ElementRange::first);
  return {from, std::max(from, to)};
}

}  // namespace

StateLayout::StateLayout(DType type, const StateFormat& format, Elems elements)
    : type(type), format(format), elements(elements), weight_bytes(elements * size_of(type)) {
  const auto arrays =
      cpu_adam::traffic(format.optimizer, cpu_adam::Weights::format_of(type), type, format.moments);
  const bool codes = format.moments == Moments::Format::blockwise8;
  const Bytes exponents = codes ? Codes::exponents_of(elements) : 0;
  Places places;
  master = places.take(elements * cpu_adam::Weights::master_width(type));
  first = places.take(elements * arrays.first_moment);
  second = places.take(elements * arrays.second_moment);
  first_exponents = places.take(first.bytes > 0 ? exponents : 0);
  second_exponents = places.take(second.bytes > 0 ? exponents : 0);
  state_bytes = round_up(places.end(), kPage);
  update_traffic = elements * arrays.bytes_per_element();
}

ShardRange even_shard(const Blueprint& blueprint, std::size_t block, bool states) {
  const model::BlockSpec& spec = blueprint.own().blocks[block];
  const step::RankSizes sizes(blueprint.problem);
  const auto number = static_cast<std::uint32_t>(block);
  const Elems all = states ? spec.trained_elements() : spec.plain_elements();
  const Bytes shard = states ? sizes.gradient_shard(number) : sizes.weight_shard(number);
  const Elems room = shard / size_of(blueprint.type);
  const Elems first = std::min(all, sizes.shard_of(blueprint.mesh.sharer()) * room);
  return {first, std::min(room, all - first), room};
}

ShardRange rank_shard(const Blueprint& blueprint, std::size_t block) {
  const Elems trained = blueprint.own().blocks[block].trained_elements();
  const step::RankSizes sizes(blueprint.problem);
  if (!sizes.keeps_part_of_states(static_cast<std::uint32_t>(block))) return {0, trained, trained};
  return even_shard(blueprint, block, true);
}

std::uint32_t sub_groups(const Blueprint& blueprint, std::size_t block) {
  const Elems size = whole_units(blueprint.sub_group_size);
  const Elems room = rank_shard(blueprint, block).room;
  return static_cast<std::uint32_t>(room / size + (room % size > 0 ? 1 : 0));
}

ShardRange sub_group_range(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group) {
  const ShardRange shard = rank_shard(blueprint, block);
  const Elems size = whole_units(blueprint.sub_group_size);
  const auto up_to = [&](Elems most) { return std::min(most, sub_group * size); };
  const auto rest = [&](Elems most) { return std::min(most - up_to(most), size); };
  return {shard.first + up_to(shard.elements), rest(shard.elements), rest(shard.room)};
}

StateLayout state_layout(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group) {
  return {blueprint.type, blueprint.states, sub_group_range(blueprint, block, sub_group).room};
}

cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group,
                           std::byte* weights, std::byte* states, const std::byte* gradient) {
  const StateLayout layout = state_layout(blueprint, block, sub_group);
  const ShardRange own = sub_group_range(blueprint, block, sub_group);
  const Elems before = own.first - rank_shard(blueprint, block).first;
  const Elems first = blueprint.first_elements.at(blueprint.own().blocks[block].number) + own.first;
  const auto undecayed = ranges_in(blueprint.undecayed, first, first + own.elements);
  if (weights != nullptr) weights += before * size_of(blueprint.type);
  if (gradient != nullptr) gradient += before * size_of(blueprint.type);
  return {.weights = cpu_adam::Weights::of(layout.type, weights, array_in(states, layout.master)),
          .moments = {layout.format.moments, array_in(states, layout.first),
                      array_in(states, layout.second),
                      array_in<std::uint8_t>(states, layout.first_exponents),
                      array_in<std::uint8_t>(states, layout.second_exponents)},
          .gradient = {layout.type, gradient},
          .size = own.elements,
          .first_element = first,
          .undecayed = undecayed};
}

ChannelMembers::ChannelMembers(const Mesh& mesh, std::uint32_t per_copy, bool experts) {
  const std::uint32_t sharers = mesh.sharers();
  const std::uint32_t here = mesh.sharer();
  if (sharers > 1) {
    for (std::uint32_t shard = 0; shard < sharers; ++shard) {
      const std::uint32_t sharer = step::owner_of_shard(shard, sharers, per_copy);
      const std::uint32_t rank = mesh.rank_of(sharer);
      all.push_back(rank);
      if (per_copy == sharers) continue;
      if (sharer / per_copy == here / per_copy) weight_copy.push_back(rank);
      if (sharer % per_copy == here % per_copy) same_share.push_back(rank);
    }
  }
  if (experts) rows = all;
  if (mesh.sequence > 1) heads = mesh.sequence_ranks();
  if (mesh.tensor > 1) tensor = mesh.tensor_ranks();
}

std::uint32_t ChannelMembers::count() const {
  const std::array channels = {&all, &weight_copy, &same_share, &rows, &heads, &tensor};
  return static_cast<std::uint32_t>(std::count_if(
      channels.begin(), channels.end(), [](const auto* members) { return !members->empty(); }));
}

}  // namespace ballast::engine
