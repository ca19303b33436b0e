#include "ballast/engine/blueprint.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/engine/outline.h"
#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

/// Fills in what the wishes leave open, without knowing any rate.
class GreedyFill {
 public:
  GreedyFill(Blueprint& blueprint, const std::vector<Wish>& wishes)
      : blueprint_(blueprint), wishes_(wishes) {}

  /// Starts with every open choice on the slowest tier and moves blocks up, one kind and one tier
  /// at a time, in forward order, as long as the budgets hold.
  void place() {
    auto& blocks = blueprint_.placement.blocks;
    for (std::size_t b = 0; b < wishes_.size(); ++b) {
      const Wish& wish = wishes_[b];
      const bool layer = schedule::is_layer(b, wishes_.size());
      blocks.push_back({wish.weights.value_or(Tier::nvme), wish.optimizer.value_or(Tier::nvme),
                        wish.activations.value_or(Tier::nvme),
                        layer && !wish.recompute.value_or(true)});
    }
    for (const Tier tier : {Tier::host, Tier::device}) {
      promote(&schedule::BlockPlacement::activations, &Wish::activations, tier);
      promote(&schedule::BlockPlacement::weights, &Wish::weights, tier);
      promote(&schedule::BlockPlacement::optimizer, &Wish::optimizer, tier);
    }
    keep_intermediates();
  }

 private:
  [[nodiscard]] bool fits() const {
    return make_ledger(schedule::list_buffers(blueprint_.workload, blueprint_.placement,
                                              blueprint_.options))
        .fits(blueprint_.budgets);
  }

  void promote(Tier schedule::BlockPlacement::*kind, config::TierChoice Wish::*wish, Tier tier) {
    auto& blocks = blueprint_.placement.blocks;
    if (try_all(kind, wish, tier)) return;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      if (wishes_[b].*wish) continue;
      const Tier before = blocks[b].*kind;
      blocks[b].*kind = tier;
      if (fits()) continue;
      blocks[b].*kind = before;
      return;
    }
  }

  /// All open blocks at once: the common case, and a passing place saved may be what makes it fit.
  bool try_all(Tier schedule::BlockPlacement::*kind, config::TierChoice Wish::*wish, Tier tier) {
    auto& blocks = blueprint_.placement.blocks;
    const auto before = blocks;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      if (!(wishes_[b].*wish)) blocks[b].*kind = tier;
    }
    if (blocks == before || fits()) return true;
    blocks = before;
    return false;
  }

  /// Last layers first: theirs are wanted back first.
  void keep_intermediates() {
    auto& blocks = blueprint_.placement.blocks;
    for (std::size_t b = blocks.size() - 1; b-- > 1;) {
      if (wishes_[b].recompute) continue;
      blocks[b].keeps_intermediates = true;
      if (fits()) continue;
      blocks[b].keeps_intermediates = false;
      return;
    }
  }

  Blueprint& blueprint_;
  const std::vector<Wish>& wishes_;
};

/// What is special about the gathers of split weights between ranks: "" where nothing is.
std::string describe_gathers(const Blueprint& blueprint) {
  const schedule::Workload& work = blueprint.workload;
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

}  // namespace

memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets wanted,
                                Bytes available, std::uint32_t local_rank) {
  return memory::resolve_budgets(wanted, available, own_device_memory(config, local_rank));
}

Bytes own_device_memory(const config::Config& config, std::uint32_t local_rank) {
  return device::own_memory({.kind = config.ballast.device, .local_rank = local_rank});
}

memory::Ledger make_ledger(const std::vector<schedule::Buffer>& buffers) {
  memory::Ledger ledger;
  for (const schedule::Buffer& buffer : buffers) {
    ledger.add(buffer.tier, to_string(buffer.kind), round_up(buffer.bytes, kPage));
  }
  return ledger;
}

Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                         const memory::Budgets& budgets, const model::KernelMemory& kernels,
                         std::uint32_t world, std::uint32_t rank) {
  Blueprint blueprint = outline(config, model, budgets, kernels, world);
  blueprint.rank = rank;
  GreedyFill(blueprint, read_wishes(config, blueprint.model.blocks.size())).place();
  blueprint.ledger = make_ledger(
      schedule::list_buffers(blueprint.workload, blueprint.placement, blueprint.options));
  blueprint.ledger.require_fit(budgets);
  blueprint.schedule = schedule::build(blueprint.workload, blueprint.placement, blueprint.options);
  return blueprint;
}

namespace {

/// Empty for a model without layers.
std::string describe_kept(const Blueprint& blueprint) {
  const std::size_t layers = blueprint.placement.blocks.size() - 2;
  std::size_t kept = 0;
  for (std::size_t b = 1; b <= layers; ++b) {
    kept += blueprint.placement.blocks[b].keeps_intermediates ? 1 : 0;
  }
  if (layers == 0) return "";
  if (kept == 0) return "computed again in the backward pass";
  if (kept == layers) return "kept on device";
  return fmt::format("of {} layer{} kept on device, of {} computed again", kept,
                     kept == 1 ? "" : "s", layers - kept);
}

}  // namespace

std::vector<std::string> describe_placement(const Blueprint& blueprint) {
  std::vector<std::string> lines;
  const auto describe = [&](std::string_view what, Tier schedule::BlockPlacement::*kind) {
    std::array<std::size_t, 3> count{};
    for (const auto& block : blueprint.placement.blocks) {
      ++count[static_cast<std::size_t>(block.*kind)];
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
  describe("weights", &schedule::BlockPlacement::weights);
  describe("optimizer states", &schedule::BlockPlacement::optimizer);
  if (blueprint.states.moments != cpu_adam::Moments::Format::f32) {
    const bool codes = blueprint.states.moments == cpu_adam::Moments::Format::blockwise8;
    lines.push_back(fmt::format("{:<17} {}; results differ from those with fp32 states", "moments",
                                codes ? "in 8 bits" : "first in bf16"));
  }
  if (const std::string text = describe_gathers(blueprint); !text.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "weights gathered", text));
  }
  describe("activations", &schedule::BlockPlacement::activations);
  if (const std::string kept = describe_kept(blueprint); !kept.empty()) {
    lines.push_back(fmt::format("{:<17} {}", "intermediates", kept));
  }
  return lines;
}

}  // namespace ballast::engine
