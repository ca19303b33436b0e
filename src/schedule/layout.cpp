#include "src/schedule/layout.h"

#include <algorithm>

#include <fmt/format.h>

namespace ballast::schedule {
namespace {

class LayoutMaker {
 public:
  LayoutMaker(const Workload& workload, const Placement& placement, const Options& options)
      : work_(workload), place_(placement), options_(options) {}

  Layout make() {
    homes();
    weight_passage();
    state_passage();
    gradients();
    activations();
    batch();
    layout_.workspace = add("workspace", Tier::device, Kind::workspace, work_.workspace_bytes);
    return std::move(layout_);
  }

 private:
  using SizeOf = Bytes BlockWork::*;

  [[nodiscard]] std::size_t blocks() const { return work_.blocks.size(); }
  [[nodiscard]] const BlockPlacement& at(std::size_t block) const { return place_.blocks[block]; }

  BufferId add(std::string name, Tier tier, Kind kind, Bytes bytes) {
    layout_.buffers.push_back({std::move(name), tier, kind, bytes});
    return static_cast<BufferId>(layout_.buffers.size() - 1);
  }

  std::vector<BufferId> add_slots(std::string_view name, Tier tier, Kind kind, Bytes bytes,
                                  std::size_t count) {
    std::vector<BufferId> slots;
    if (bytes == 0) return slots;
    for (std::size_t i = 0; i < count; ++i) {
      slots.push_back(add(fmt::format("{} {}", name, i), tier, kind, bytes));
    }
    return slots;
  }

  /// Largest `size` among the blocks for which `wanted` holds, and how many they are.
  template <class Wanted>
  [[nodiscard]] std::pair<Bytes, std::size_t> largest(SizeOf size, Wanted wanted) const {
    Bytes bytes = 0;
    std::size_t count = 0;
    for (std::size_t b = 0; b < blocks(); ++b) {
      if (!wanted(at(b))) continue;
      bytes = std::max(bytes, work_.blocks[b].*size);
      ++count;
    }
    return {bytes, count};
  }

  void homes() {
    for (std::size_t b = 0; b < blocks(); ++b) {
      const BlockWork& block = work_.blocks[b];
      layout_.weight_home.push_back(
          add(block.name + " weights", at(b).weights, Kind::weights, block.weight_bytes));
      layout_.state_home.push_back(
          add(block.name + " states", at(b).optimizer, Kind::states, block.state_bytes));
    }
  }

  void weight_passage() {
    const auto [bytes, count] = largest(&BlockWork::weight_bytes, [](const BlockPlacement& p) {
      return p.weights != Tier::device;
    });
    const bool tied_in_transit = work_.tied && at(0).weights != Tier::device;
    const std::size_t slots = options_.weight_slots + (tied_in_transit ? 1 : 0);
    layout_.weight_slots =
        add_slots("weights in transit", Tier::device, Kind::staging, bytes, std::min(slots, count));
    const auto [staged, staged_count] =
        largest(&BlockWork::weight_bytes, [](const BlockPlacement& p) {
          const bool to_nvme = p.weights == Tier::nvme;
          const bool borrowed = p.weights == Tier::device && p.optimizer != Tier::device;
          return to_nvme || borrowed;
        });
    layout_.weight_staging =
        add_slots("weight staging", Tier::host, Kind::staging, staged,
                  std::min<std::size_t>(options_.staging_buffers, staged_count));
  }

  void state_passage() {
    const auto [bytes, count] = largest(
        &BlockWork::state_bytes, [](const BlockPlacement& p) { return p.optimizer == Tier::nvme; });
    layout_.state_staging = add_slots("state staging", Tier::host, Kind::staging, bytes,
                                      std::min<std::size_t>(options_.staging_buffers, count));
  }

  void gradients() {
    for (std::size_t b = 0; b < blocks(); ++b) {
      const Tier side = at(b).optimizer == Tier::device ? Tier::device : Tier::host;
      layout_.gradient.push_back(add(work_.blocks[b].name + " gradient", side, Kind::gradients,
                                     work_.blocks[b].gradient_bytes));
    }
    const auto [packed, count] = largest(&BlockWork::gradient_bytes, [](const BlockPlacement& p) {
      return p.optimizer != Tier::device;
    });
    layout_.gradient_slots = add_slots("gradients in transit", Tier::device, Kind::staging, packed,
                                       std::min<std::size_t>(2, count));
    accumulators();
    if (work_.tied) {
      layout_.tied_accumulator =
          add("tied accumulator", Tier::device, Kind::accumulators, work_.tied_accumulator_bytes);
    }
  }

  void accumulators() {
    if (options_.order == Order::layer_major) {
      const Bytes bytes =
          largest(&BlockWork::accumulator_bytes, [](const BlockPlacement&) { return true; }).first;
      const BufferId shared = add("gradient accumulator", Tier::device, Kind::accumulators, bytes);
      layout_.accumulator.assign(blocks(), shared);
      return;
    }
    for (const BlockWork& block : work_.blocks) {
      layout_.accumulator.push_back(add(block.name + " accumulator", Tier::device,
                                        Kind::accumulators, block.accumulator_bytes));
    }
  }

  void activations() {
    const bool layer_major = options_.order == Order::layer_major;
    const std::uint32_t together = layer_major ? work_.micro_batches : 1;
    const Tier tier = place_.activations_on_host ? Tier::host : Tier::device;
    layout_.input_home.resize(blocks());
    for (std::size_t b = 1; b < blocks(); ++b) {
      // The head consumes its input at once, so that one never leaves the device.
      const bool leaves = tier == Tier::host && b + 1 < blocks();
      for (std::uint32_t m = 0; m < together; ++m) {
        if (tier == Tier::host && !leaves) continue;
        layout_.input_home[b].push_back(add(fmt::format("input of {}, {}", work_.blocks[b].name, m),
                                            tier, Kind::activations, work_.activation_bytes));
      }
    }
    if (tier == Tier::host) {
      layout_.activation_slots = add_slots("activations in transit", Tier::device,
                                           Kind::activations, work_.activation_bytes, together + 2);
    }
    layout_.flow = add_slots("activation gradient", Tier::device, Kind::activations,
                             work_.activation_bytes, together);
  }

  void batch() {
    layout_.batch_host =
        add_slots("batch", Tier::host, Kind::batch, work_.batch_bytes, work_.micro_batches);
    layout_.batch_device = add_slots("batch on device", Tier::device, Kind::batch,
                                     work_.batch_bytes, work_.micro_batches);
    layout_.results_device = add("results", Tier::device, Kind::batch, work_.results_bytes);
    layout_.results_host = add("results on host", Tier::host, Kind::batch, work_.results_bytes);
  }

  const Workload& work_;
  const Placement& place_;
  const Options& options_;
  Layout layout_;
};

}  // namespace

Layout make_layout(const Workload& workload, const Placement& placement, const Options& options) {
  return LayoutMaker(workload, placement, options).make();
}

}  // namespace ballast::schedule
