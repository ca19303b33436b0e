#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "src/planner/constraints.h"
#include "src/planner/search.h"

namespace ballast::planner {

using schedule::BlockPlacement;
using schedule::Placement;

Program concatenate(const Program& device, const Program& host) {
  Program program = device;
  program.insert(program.end(), host.begin(), host.end());
  return program;
}

schedule::Options with_buffers(const config::Config& config, schedule::Options options,
                               Buffers number) {
  if (number == Buffers::usual) return options;
  if (config.zero.optimizer.buffer_count == 0) options.state_staging = 1;
  if (config.zero.parameters.buffer_count == 0) options.weight_staging = 1;
  if (config.ballast.device_weight_buffers == 0) options.weight_slots = 2;
  if (config.ballast.activation_buffers == 0) options.activation_staging = 1;
  if (config.ballast.gradient_buffers == 0) options.gradient_staging = 1;
  if (number == Buffers::few) return options;
  if (config.ballast.device_weight_buffers == 0) options.weight_slots = 1;
  if (config.ballast.device_gradient_buffers == 0) options.gradient_slots = 1;
  return options;
}

namespace {

/// Raises the numbers of buffers to those of `usual`, or halfway, as far as `placement` still fits.
void add_buffers(const Filler& filler, const schedule::Placement& placement,
                 const schedule::Options& usual, schedule::Options& options) {
  using schedule::Options;
  constexpr std::array kCounts = {&Options::state_staging,      &Options::weight_slots,
                                  &Options::weight_staging,     &Options::gradient_staging,
                                  &Options::activation_staging, &Options::gradient_slots};
  for (const auto count : kCounts) {
    for (const std::uint32_t wanted : {usual.*count, (usual.*count + 1) / 2}) {
      if (wanted <= options.*count) continue;
      schedule::Options more = options;
      more.*count = wanted;
      if (filler.excess(placement, more) == 0) options = more;
    }
  }
}

}  // namespace

namespace {

/// Fills with the first of kBuffers that fits and then adds the buffers for which there is room.
/// Without one that fits, `options` and the result are those of the last try.
Placement fill_with_some_buffers(const Filler& filler, const Program& program,
                                 const config::Config& config, schedule::Options& options) {
  const schedule::Options usual = options;
  Placement placement;
  for (const Buffers number : kBuffers) {
    options = with_buffers(config, options, number);
    placement = filler.fill(program, options);
    if (filler.excess(placement, options) > 0) continue;
    add_buffers(filler, placement, usual, options);
    break;
  }
  return placement;
}

}  // namespace

Placement fill_with_fewer_buffers(const Filler& filler, const Program& program,
                                  const config::Config& config, schedule::Options& options) {
  const schedule::Options usual = options;
  Placement placement = fill_with_some_buffers(filler, program, config, options);
  if (filler.excess(placement, options) == 0 || !opens_gradients(config)) return placement;
  for (const Program& swapping : with_swapped_gradients({program})) {
    options = usual;
    placement = fill_with_some_buffers(filler, swapping, config, options);
    if (filler.excess(placement, options) == 0) break;
  }
  return placement;
}

std::vector<schedule::Order> orders(const config::Config& config,
                                    const schedule::Options& options) {
  if (config.ballast.order != "auto") return {options.order};
  return {schedule::Order::layer_major, schedule::Order::micro_batch_major};
}

std::vector<Program> with_swapped_gradients(const std::vector<Program>& programs) {
  const Program host = {{.kind = Movable::gradients, .tier = Tier::host}};
  std::vector<Program> swapping;
  swapping.reserve(2 * programs.size());
  for (const Program& program : programs) {
    swapping.push_back(concatenate(program, host));
    swapping.push_back(concatenate(host, program));
  }
  return swapping;
}

bool opens_gradients(const config::Config& config) {
  const auto constraints = read_constraints(config, model::count_blocks(config.model));
  return std::any_of(constraints.begin(), constraints.end(),
                     [](const PlacementConstraint& one) { return !one.gradients; });
}

std::vector<Program> rule_programs(const config::Config& config) {
  using enum Movable;
  const Program usual = concatenate(
      {{activations, Tier::device, Pattern::last}, {activations, Tier::host, Pattern::last}},
      keep_intermediates());
  const auto constraints = read_constraints(config, model::count_blocks(config.model));
  const bool open = std::any_of(constraints.begin(), constraints.end(),
                                [](const auto& one) { return !one.activations || !one.gradients; });
  if (!open) return {usual};
  return {usual, concatenate({{.kind = all}}, usual)};
}

namespace {

/// A placement that follows the rule in one order.
struct Followed {
  Placement placement;
  schedule::Options options;
};

/// Whether the micro-batch-major `other` is faster than the layer-major `usual` on any machine: no
/// weights move for each micro-batch, and it recomputes less, or the same with fewer activations
/// that move.
bool is_surely_faster(const Followed& other, const Followed& usual) {
  const auto count = [](const Followed& one, auto matches) {
    const auto& blocks = one.placement.blocks;
    return std::count_if(blocks.begin(), blocks.end(), matches);
  };
  const auto moves_weights = [](const BlockPlacement& b) { return b.weights != Tier::device; };
  const auto keeps = [](const BlockPlacement& b) { return b.keeps_intermediates; };
  const auto moves_input = [](const BlockPlacement& b) { return b.activations != Tier::device; };
  if (count(other, moves_weights) > 0) return false;
  const auto kept = std::pair(count(other, keeps), count(usual, keeps));
  if (kept.first != kept.second) return kept.first > kept.second;
  return count(other, moves_input) < count(usual, moves_input);
}

}  // namespace

Placement place_by_rule(const Filler& filler, const config::Config& config,
                        schedule::Options& options) {
  Followed last;
  for (const Program& program : rule_programs(config)) {
    std::optional<Followed> best;
    for (const schedule::Order order : orders(config, options)) {
      last.options = options;
      last.options.order = order;
      last.placement = fill_with_fewer_buffers(filler, program, config, last.options);
      if (filler.excess(last.placement, last.options) > 0) continue;
      if (!best || is_surely_faster(last, *best)) best = last;
    }
    if (!best) continue;
    options = best->options;
    return std::move(best->placement);
  }
  options = last.options;
  return std::move(last.placement);
}

}  // namespace ballast::planner
