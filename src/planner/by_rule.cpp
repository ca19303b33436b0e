#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "src/planner/filling.h"
#include "src/planner/search.h"

namespace ballast::planner {

namespace {

/// Returns whether only layer-major order suits the run if the user leaves it open.
bool needs_layer_major(const engine::RunInputs& run) {
  if (run.devices.count > 1) return true;
  const bool several = run.batch.automatic || run.batch.accumulation > 1;
  return several && !run.constraints.order && run.has_losses_of_step();
}

}  // namespace

using step::BlockPlacement;
using step::Placement;

PlacementRecipe concatenate(const PlacementRecipe& device, const PlacementRecipe& host) {
  PlacementRecipe recipe = device;
  recipe.insert(recipe.end(), host.begin(), host.end());
  return recipe;
}

step::Options with_buffers(const engine::RunInputs& run, step::Options options,
                           BufferLevel number) {
  if (number == BufferLevel::usual) return options;
  for (const step::BufferKind& kind : step::kBufferKinds) {
    if (run.constraints.buffers.*(kind.count) > 0) continue;
    options.buffers.*(kind.count) =
        number == BufferLevel::few ? kind.few : step::BufferKind::kFewest;
  }
  return options;
}

namespace {

/// Raises the numbers of buffers to those of `usual`, or halfway, while `placement` still fits.
void add_buffers(const TierFiller& filler, const step::Placement& placement,
                 const step::Options& usual, step::Options& options) {
  for (const step::BufferKind& kind : step::kBufferKinds) {
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
                                 const engine::RunInputs& run, step::Options& options) {
  const step::Options usual = options;
  Placement placement;
  for (const BufferLevel number : kBufferLevels) {
    options = with_buffers(run, options, number);
    placement = filler.fill(recipe, options);
    if (filler.excess(placement, options) > 0) continue;
    add_buffers(filler, placement, usual, options);
    break;
  }
  return placement;
}

}  // namespace

Placement fill_with_fewer_buffers(const TierFiller& filler, const PlacementRecipe& recipe,
                                  const engine::RunInputs& run, step::Options& options) {
  const step::Options usual = options;
  Placement placement = fill_with_some_buffers(filler, recipe, run, options);
  if (filler.excess(placement, options) == 0 || !opens_gradients(run)) return placement;
  for (const PlacementRecipe& swapping : with_swapped_gradients({recipe})) {
    options = usual;
    placement = fill_with_some_buffers(filler, swapping, run, options);
    if (filler.excess(placement, options) == 0) break;
  }
  return placement;
}

std::vector<step::Order> orders(const engine::RunInputs& run, const step::Options& options) {
  if (needs_layer_major(run)) return {step::Order::layer_major};
  if (run.constraints.order) return {options.order};
  return {step::Order::layer_major, step::Order::micro_batch_major};
}

std::vector<step::Order> last_orders(const engine::RunInputs& run) {
  if (needs_layer_major(run) || run.constraints.order) return {};
  return {step::Order::micro_batch_major_offload};
}

namespace {

/// Returns the numbers of devices that are tried if the run leaves theirs open.
std::vector<std::uint32_t> open_device_counts(const PlanRequest& request) {
  const std::optional<step::Order> order = request.run.constraints.order;
  if (order && *order != step::Order::layer_major) return {1};
  // A device without a layer has hardly anything to do.
  const auto most = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(request.devices, request.run.model.config.num_layers));
  std::vector<std::uint32_t> counts;
  for (std::uint32_t count = 1; count < most; count *= 2) counts.push_back(count);
  counts.push_back(std::max(most, 1U));
  return counts;
}

}  // namespace

std::vector<std::uint32_t> device_counts(const PlanRequest& request) {
  const engine::DeviceRequest& devices = request.run.devices;
  return devices.open ? open_device_counts(request) : std::vector{devices.count};
}

std::vector<std::uint32_t> larger_device_counts(const PlanRequest& request) {
  const engine::DeviceRequest& devices = request.run.devices;
  if (devices.open) return {};
  std::vector<std::uint32_t> counts = open_device_counts(request);
  std::erase_if(counts, [&](std::uint32_t count) { return count <= devices.count; });
  return counts;
}

PlanRequest on_devices(PlanRequest request, std::uint32_t count) {
  engine::DeviceRequest& devices = request.run.devices;
  devices.count = count;
  devices.open = false;
  return request;
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

bool opens_gradients(const engine::RunInputs& run) {
  const auto constraints = read_constraints(run);
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.gradients; });
}

std::vector<PlacementRecipe> rule_recipes(const engine::RunInputs& run) {
  using enum TensorClass;
  const PlacementRecipe usual = concatenate(
      {{activations, Tier::device, BlockOrder::last}, {activations, Tier::host, BlockOrder::last}},
      keep_intermediates());
  const auto constraints = read_constraints(run);
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

Placement place_by_rule(const TierFiller& filler, const engine::RunInputs& run,
                        step::Options& options) {
  RuleResult last;
  for (const auto& open : {orders(run, options), last_orders(run)}) {
    for (const PlacementRecipe& recipe : rule_recipes(run)) {
      std::optional<RuleResult> best;
      for (const step::Order order : open) {
        last.options = options;
        last.options.order = order;
        last.placement = fill_with_fewer_buffers(filler, recipe, run, last.options);
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
