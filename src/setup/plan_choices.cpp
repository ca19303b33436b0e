#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/plan/lane_times.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

namespace ballast::setup {
namespace {

using step::BlockPlacement;
using step::Kept;
using text::Json;

constexpr std::string_view kExceptAttention = "except_attention";  ///< a value of `recompute`

/// Returns the tier that most blocks have, the faster one on a tie.
Tier usual(const std::vector<BlockPlacement>& blocks, Tier BlockPlacement::*kind) {
  std::array<std::size_t, 3> count{};
  for (const BlockPlacement& block : blocks) ++count.at(static_cast<std::size_t>(block.*kind));
  return kTiers.at(
      static_cast<std::size_t>(std::max_element(count.begin(), count.end()) - count.begin()));
}

/// Returns what most of the blocks that may keep intermediates keep; on a tie, less.
Kept mostly_kept(const step::Problem& problem, const std::vector<BlockPlacement>& blocks) {
  std::array<std::size_t, 3> count{};
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (problem.index->may_keep(b)) ++count.at(static_cast<std::size_t>(blocks[b].kept));
  }
  return static_cast<Kept>(std::max_element(count.begin(), count.end()) - count.begin());
}

/// Writes a placement into `config`: the most common tiers as sections, other blocks as rules.
void name_placement(config::Config& config, const step::Problem& problem,
                    std::vector<BlockPlacement> blocks) {
  std::vector<BlockPlacement> trained;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!problem.blocks[b].is_frozen()) trained.push_back(blocks[b]);
  }
  const BlockPlacement most = {usual(blocks, &BlockPlacement::weights),
                               usual(trained, &BlockPlacement::optimizer),
                               usual(blocks, &BlockPlacement::activations),
                               mostly_kept(problem, blocks),
                               false,
                               usual(trained, &BlockPlacement::gradients)};
  // Written as a number, because the blocks follow from the tiers.
  for (BlockPlacement& block : blocks) block.speculates = false;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!problem.index->may_keep(b)) blocks[b].kept = most.kept;
    if (!problem.blocks[b].is_frozen()) continue;
    blocks[b].optimizer = most.optimizer;
    blocks[b].gradients = most.gradients;
  }
  config.zero.parameters.tier = most.weights;
  config.zero.optimizer.tier = most.optimizer;
  config.ballast.activations = most.activations;
  config.ballast.gradients = most.gradients;
  config.ballast.kept = most.kept;
  config.ballast.placement.clear();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b] == most) continue;
    step::PlacementRule rule;
    rule.first_block = b;
    rule.last_block = b;
    while (rule.last_block + 1 < blocks.size() && blocks[rule.last_block + 1] == blocks[b]) {
      ++rule.last_block;
    }
    b = rule.last_block;
    if (blocks[b].weights != most.weights) rule.weights = blocks[b].weights;
    if (blocks[b].optimizer != most.optimizer) rule.optimizer = blocks[b].optimizer;
    if (blocks[b].activations != most.activations) rule.activations = blocks[b].activations;
    if (blocks[b].gradients != most.gradients) rule.gradients = blocks[b].gradients;
    if (blocks[b].kept != most.kept) rule.kept = blocks[b].kept;
    config.ballast.placement.push_back(rule);
  }
}

/// Returns the member `key` of an object.
const Json& member(const Json& json, std::string_view key) {
  if (const Json* const found = json.find(key)) return *found;
  throw Error(ErrorCategory::config, fmt::format("it lacks \"{}\"", key));
}

std::uint64_t whole(const Json& json, std::string_view key) {
  if (const auto value = member(json, key).whole()) return *value;
  throw Error(ErrorCategory::config, fmt::format("\"{}\" must be a whole number", key));
}

std::uint32_t read_devices(const Json& json) {
  const std::uint64_t count = whole(json, "devices");
  if (count >= 1 && count <= plan::kMaxDevices) return static_cast<std::uint32_t>(count);
  throw Error(ErrorCategory::config, fmt::format("\"devices\" must be 1 to {}", plan::kMaxDevices));
}

bool flag(const Json& json, std::string_view key) {
  if (const Json& value = member(json, key); value.is_boolean()) return value.flag();
  throw Error(ErrorCategory::config, fmt::format("\"{}\" must be true or false", key));
}

Tier tier(const Json& json, std::string_view key) {
  for (const Tier one : kTiers) {
    if (member(json, key) == to_string(one)) return one;
  }
  throw Error(ErrorCategory::config, fmt::format("\"{}\" must be device, host or nvme", key));
}

Kept read_kept(const Json& json) {
  if (member(json, "recompute") == kExceptAttention) return Kept::attention;
  return flag(json, "recompute") ? Kept::nothing : Kept::all;
}

BlockPlacement read_block(const Json& json) {
  return {.weights = tier(json, "weights"),
          .optimizer = tier(json, "optimizer"),
          .activations = tier(json, "activations"),
          .kept = read_kept(json),
          .speculates = flag(json, "speculates"),
          .gradients = tier(json, "gradients")};
}

/// Returns runs of equal blocks, each with its length.
Json placement_data(const step::Placement& placement) {
  Json list = Json::array();
  const auto& blocks = placement.blocks;
  for (auto first = blocks.begin(); first != blocks.end();) {
    const auto end =
        std::find_if(first, blocks.end(), [&](const auto& block) { return !(block == *first); });
    Json run = block_json(*first);
    run.add("blocks", static_cast<std::uint64_t>(end - first));
    list.push_back(std::move(run));
    first = end;
  }
  return list;
}

step::Placement read_placement(const Json& list) {
  constexpr std::size_t kMaxBlocks = std::size_t{1} << 24U;
  if (!list.is_array()) throw Error(ErrorCategory::config, "\"placement\" must be an array");
  step::Placement placement;
  for (const Json& run : list.elements()) {
    const std::uint64_t count = whole(run, "blocks");
    if (count > kMaxBlocks - placement.blocks.size()) {
      throw Error(ErrorCategory::config, "\"placement\" has too many blocks");
    }
    placement.blocks.insert(placement.blocks.end(), count, read_block(run));
  }
  return placement;
}

}  // namespace

PlanChoices choices_of(const engine::Blueprint& blueprint) {
  const std::uint64_t sequences = blueprint.pairs ? 2 : 1;
  return {.micro_batch = blueprint.shape.sequences / sequences,
          .expert_ranks = blueprint.model.split.experts,
          .devices = blueprint.problem.devices,
          .sub_group_size = blueprint.sub_group_size,
          .budgets = blueprint.budgets,
          .order = blueprint.options.order,
          .prefetches_experts = blueprint.options.prefetches_experts,
          .buffers = blueprint.options.buffers,
          .placement = blueprint.placement};
}

config::Config with_sizes(const config::Config& config, const PlanChoices& chosen,
                          std::uint32_t data_ranks) {
  config::Config sized = config;
  if (leaves_choices(config)) {
    sized.batch.micro_batch = chosen.micro_batch;
    sized.batch.accumulation = config.batch.train_batch / data_ranks / chosen.micro_batch;
    sized.batch.automatic = false;
    sized.ballast.expert_parallel = chosen.expert_ranks;
  }
  sized.pipeline.stages = chosen.devices;
  auto& listed = sized.ballast.devices;
  if (listed.size() > chosen.devices) listed.resize(chosen.devices);
  sized.ballast.device_bytes = chosen.budgets.device;
  sized.ballast.host_bytes = chosen.budgets.host;
  sized.zero.sub_group_size = chosen.sub_group_size;
  return sized;
}

config::Config settle(const config::Config& config, const engine::Blueprint& blueprint) {
  const PlanChoices chosen = choices_of(blueprint);
  config::Config asked = config;
  asked.pipeline.stages = chosen.devices;
  config::Config settled = with_sizes(asked, chosen, blueprint.mesh.data);
  const auto& blocks = chosen.placement.blocks;
  name_placement(settled, blueprint.problem, blocks);
  settled.ballast.order = chosen.order;
  // A rule makes the other choices again, because they follow from the keys that are set.
  if (!leaves_choices(asked)) return settled;
  settled.buffers = chosen.buffers;
  settled.ballast.expert_prefetch = chosen.prefetches_experts;
  settled.ballast.speculative_updates = static_cast<std::uint64_t>(std::count_if(
      blocks.begin(), blocks.end(), [](const BlockPlacement& block) { return block.speculates; }));
  return settled;
}

Json block_json(const BlockPlacement& block) {
  return Json::object(
      {{"weights", to_string(block.weights)},
       {"optimizer", to_string(block.optimizer)},
       {"activations", to_string(block.activations)},
       {"gradients", to_string(block.gradients)},
       {"recompute",
        block.kept == Kept::attention ? Json(kExceptAttention) : Json(block.kept == Kept::nothing)},
       {"speculates", block.speculates}});
}

Json choices_json(const PlanChoices& choices) {
  Json buffers = Json::object();
  for (const step::BufferKind& kind : step::kBufferKinds) {
    buffers.add(std::string(kind.key), choices.buffers.*(kind.count));
  }
  return Json::object({{"micro_batch", choices.micro_batch},
                       {"expert_ranks", choices.expert_ranks},
                       {"devices", choices.devices},
                       {"sub_group_size", choices.sub_group_size},
                       {"device_bytes", choices.budgets.device},
                       {"host_bytes", choices.budgets.host},
                       {"order", config::name_of(std::optional(choices.order))},
                       {"expert_prefetch", choices.prefetches_experts},
                       {"buffers", std::move(buffers)},
                       {"placement", placement_data(choices.placement)}});
}

PlanChoices read_choices(const Json& json) {
  PlanChoices choices = {.micro_batch = whole(json, "micro_batch"),
                         .expert_ranks = whole(json, "expert_ranks"),
                         .devices = read_devices(json),
                         .sub_group_size = whole(json, "sub_group_size"),
                         .budgets = {whole(json, "device_bytes"), whole(json, "host_bytes")},
                         .prefetches_experts = flag(json, "expert_prefetch"),
                         .placement = read_placement(member(json, "placement"))};
  const auto order = config::value_named<std::optional<step::Order>>(member(json, "order").text());
  if (!order || !*order) throw Error(ErrorCategory::config, "\"order\" is not an order");
  choices.order = **order;
  const Json& buffers = member(json, "buffers");
  for (const step::BufferKind& kind : step::kBufferKinds) {
    choices.buffers.*(kind.count) = static_cast<std::uint32_t>(whole(buffers, kind.key));
  }
  return choices;
}

namespace {

Json ledger_json(const memory::Ledger& ledger) {
  Json list = Json::array();
  for (const memory::LedgerLine& line : ledger.lines()) {
    Json one =
        Json::object({{"tier", to_string(line.tier)}, {"kind", line.kind}, {"bytes", line.bytes}});
    if (ledger.devices() > 1 && line.tier == Tier::device) one["device"] = line.device;
    list.push_back(std::move(one));
  }
  return list;
}

Json lanes_json(const plan::Prediction& prediction, std::uint32_t devices) {
  Json lanes = Json::object();
  for (const plan::Lane lane : plan::lanes_of(devices)) {
    const auto i = static_cast<std::size_t>(lane);
    lanes[to_string(lane)] = Json::object({{"busy_seconds", prediction.busy_seconds.at(i)},
                                           {"stalled_seconds", prediction.stalled_seconds.at(i)},
                                           {"bytes", prediction.bytes.at(i)}});
    if (devices == 1 || !is_per_device(lane)) continue;
    Json busy = Json::array();
    for (std::uint8_t device = 0; device < devices; ++device) {
      busy.push_back(prediction.busy_seconds_by_number.at(plan::lane_number(lane, device)));
    }
    lanes[to_string(lane)]["busy_seconds_by_device"] = std::move(busy);
  }
  return lanes;
}

Json bounds_json(const plan::Prediction& prediction) {
  Json list = Json::array();
  for (const auto& bound : prediction.bounds) {
    list.push_back(Json::object({{"lane", to_string(bound.lane)}, {"seconds", bound.seconds}}));
  }
  return list;
}

/// bottleneck, second_bottleneck: lanes. bound_by: the resource of the first, null if no lane is
/// busy for nearly all of the step.
void add_bottleneck(const plan::Prediction& prediction, Json& out) {
  const plan::Bottleneck found =
      plan::find_bottleneck(prediction.busy_seconds, prediction.step_seconds);
  out["bottleneck"] = to_string(found.lane);
  out["second_bottleneck"] = found.second ? Json(to_string(*found.second)) : Json();
  out["bound_by"] = found.bounds() ? Json(resource_of(found.lane)) : Json();
}

Json placement_json(const step::Placement& placement) {
  Json list = Json::array();
  for (const auto& block : placement.blocks) list.push_back(block_json(block));
  return list;
}

}  // namespace

Json plan_json(const engine::Blueprint& blueprint, const plan::Prediction* prediction) {
  Json out;
  if (prediction != nullptr) out["predicted_step_seconds"] = prediction->step_seconds;
  out["ledger"] = ledger_json(blueprint.ledger);
  out["budgets"] =
      Json::object({{"device", blueprint.budgets.device}, {"host", blueprint.budgets.host}});
  for (const Tier tier : kTiers) {
    out["peak_bytes"][to_string(tier)] = blueprint.ledger.needed(tier);
  }
  out["parameters"] = blueprint.model.parameters();
  out["world"] = blueprint.mesh.ranks();
  out["devices"] = blueprint.problem.devices;
  out["stage"] = blueprint.problem.stage;
  out["micro_batch"] = blueprint.shape.sequences;
  out["accumulation"] = blueprint.micro_batches;
  out["tokens_per_step"] = blueprint.problem.tokens_per_step();
  out["placement"] = placement_json(blueprint.placement);
  const step::Options& options = blueprint.options;
  out["buffers"] = Json::object({{"weights", options.buffers.weight_staging},
                                 {"states", options.buffers.state_staging},
                                 {"activations", options.buffers.activation_staging},
                                 {"gradients", options.buffers.gradient_staging},
                                 {"device_weights", options.buffers.weight_slots},
                                 {"device_gradients", options.buffers.gradient_slots}});
  if (prediction == nullptr) return out;
  out["lanes"] = lanes_json(*prediction, blueprint.problem.devices);
  out["bounds"] = bounds_json(*prediction);
  add_bottleneck(*prediction, out);
  return out;
}

}  // namespace ballast::setup
