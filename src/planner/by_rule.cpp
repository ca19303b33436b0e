#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "src/planner/filling.h"
#include "src/planner/search.h"

namespace ballast::planner {

using step::BlockPlacement;
using step::Placement;

PlacementRecipe concatenate(const PlacementRecipe& device, const PlacementRecipe& host) {
  PlacementRecipe recipe = device;
  recipe.insert(recipe.end(), host.begin(), host.end());
  return recipe;
}

step::Options with_buffers(const config::Config& config, step::Options options,
                           BufferLevel number) {
  if (number == BufferLevel::usual) return options;
  for (const config::BufferKind& kind : config::kBufferKinds) {
    if (config.buffers.*(kind.count) > 0) continue;
    options.buffers.*(kind.count) =
        number == BufferLevel::few ? kind.few : config::BufferKind::kFewest;
  }
  return options;
}

namespace {

/// Raises the numbers of buffers to those of `usual`, or halfway, while `placement` still fits.
void add_buffers(const TierFiller& filler, const step::Placement& placement,
                 const step::Options& usual, step::Options& options) {
  for (const config::BufferKind& kind : config::kBufferKinds) {
    const auto count = kind.count;
    for (const std::uint32_t wanted : {usual.buffers.*count, (usual.buffers.*count + 1) / 2}) {
      if (wanted <= options.buffers.*count) continue;
      step::Options more = options;
      more.buffers.*count = wanted;
      if (filler.excess(placement, more) == 0) options = more;
    }
  }
}

}  // namespace

namespace {

/// Fills with the first of kBufferLevels that fits and then adds buffers while there is room. If
/// none fits, `options` and the result are those of the last try.
Placement fill_with_some_buffers(const TierFiller& filler, const PlacementRecipe& recipe,
                                 const config::Config& config, step::Options& options) {
  const step::Options usual = options;
  Placement placement;
  for (const BufferLevel number : kBufferLevels) {
    options = with_buffers(config, options, number);
    placement = filler.fill(recipe, options);
    if (filler.excess(placement, options) > 0) continue;
    add_buffers(filler, placement, usual, options);
    break;
  }
  return placement;
}

}  // namespace

Placement fill_with_fewer_buffers(const TierFiller& filler, const PlacementRecipe& recipe,
                                  const config::Config& config, step::Options& options) {
  const step::Options usual = options;
  Placement placement = fill_with_some_buffers(filler, recipe, config, options);
  if (filler.excess(placement, options) == 0 || !opens_gradients(config)) return placement;
  for (const PlacementRecipe& swapping : with_swapped_gradients({recipe})) {
    options = usual;
    placement = fill_with_some_buffers(filler, swapping, config, options);
    if (filler.excess(placement, options) == 0) break;
  }
  return placement;
}

std::vector<step::Order> orders(const config::Config& config, const step::Options& options) {
  if (config.devices() > 1) return {step::Order::layer_major};
  if (config.ballast.order) return {options.order};
  return {step::Order::layer_major, step::Order::micro_batch_major};
}

std::vector<step::Order> last_orders(const config::Config& config) {
  if (config.devices() > 1 || config.ballast.order) return {};
  return {step::Order::micro_batch_major_offload};
}

std::vector<std::uint32_t> device_counts(const PlanRequest& request) {
  const config::Config& config = request.config;
  if (config.pipeline.stages > 0) return {config.pipeline.stages};
  if (config.ballast.order && *config.ballast.order != step::Order::layer_major) return {1};
  // A device without a layer has hardly anything to do.
  const auto most =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(request.devices, config.model.num_layers));
  std::vector<std::uint32_t> counts;
  for (std::uint32_t count = 1; count < most; count *= 2) counts.push_back(count);
  counts.push_back(std::max(most, 1U));
  return counts;
}

std::vector<std::uint32_t> larger_device_counts(const PlanRequest& request) {
  const std::uint32_t named = request.config.pipeline.stages;
  if (named == 0) return {};
  PlanRequest open = request;
  open.config.pipeline.stages = 0;
  std::vector<std::uint32_t> counts = device_counts(open);
  std::erase_if(counts, [named](std::uint32_t count) { return count <= named; });
  return counts;
}

PlanRequest on_devices(const PlanRequest& request, std::uint32_t count) {
  PlanRequest fixed = request;
  fixed.config = with_devices(request.config, count);
  return fixed;
}

std::vector<PlacementRecipe> with_swapped_gradients(const std::vector<PlacementRecipe>& recipes) {
  const PlacementRecipe host = {{.kind = TensorClass::gradients, .tier = Tier::host}};
  std::vector<PlacementRecipe> swapping;
  swapping.reserve(2 * recipes.size());
  for (const PlacementRecipe& recipe : recipes) {
    swapping.push_back(concatenate(recipe, host));
    swapping.push_back(concatenate(host, recipe));
  }
  return swapping;
}

bool opens_gradients(const config::Config& config) {
  const auto constraints = read_constraints(config);
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.gradients; });
}

std::vector<PlacementRecipe> rule_recipes(const config::Config& config) {
  using enum TensorClass;
  const PlacementRecipe usual = concatenate(
      {{activations, Tier::device, BlockOrder::last}, {activations, Tier::host, BlockOrder::last}},
      keep_intermediates());
  const auto constraints = read_constraints(config);
  const bool open = std::any_of(constraints.begin(), constraints.end(),
                                [](const auto& one) { return !one.activations || !one.gradients; });
  if (!open) return {usual};
  return {usual, concatenate({{.kind = all}}, usual)};
}

namespace {

/// The result of the rule for one order.
struct RuleResult {
  Placement placement;
  step::Options options;
};

/// Returns whether the micro-batch-major `other` is faster than the layer-major `usual` on any
/// machine: no weights move per micro-batch, and it recomputes less, or the same with fewer
/// activations moved.
bool is_surely_faster(const RuleResult& other, const RuleResult& usual) {
  const auto count = [](const RuleResult& one, auto matches) {
    const auto& blocks = one.placement.blocks;
    return std::count_if(blocks.begin(), blocks.end(), matches);
  };
  const auto moves_weights = [](const BlockPlacement& b) { return b.weights != Tier::device; };
  const auto keeps = [](const BlockPlacement& b) { return b.kept == step::Kept::all; };
  const auto moves_input = [](const BlockPlacement& b) { return b.activations != Tier::device; };
  if (count(other, moves_weights) > 0) return false;
  const auto kept = std::pair(count(other, keeps), count(usual, keeps));
  if (kept.first != kept.second) return kept.first > kept.second;
  return count(other, moves_input) < count(usual, moves_input);
}

}  // namespace

Placement place_by_rule(const TierFiller& filler, const config::Config& config,
                        step::Options& options) {
  RuleResult last;
  for (const auto& open : {orders(config, options), last_orders(config)}) {
    for (const PlacementRecipe& recipe : rule_recipes(config)) {
      std::optional<RuleResult> best;
      for (const step::Order order : open) {
        last.options = options;
        last.options.order = order;
        last.placement = fill_with_fewer_buffers(filler, recipe, config, last.options);
        if (filler.excess(last.placement, last.options) > 0) continue;
        if (!best || is_surely_faster(last, *best)) best = last;
      }
      if (!best) continue;
      options = best->options;
      return std::move(best->placement);
    }
  }
  options = last.options;
  return std::move(last.placement);
}

}  // namespace ballast::planner
