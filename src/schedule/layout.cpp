#include "src/schedule/layout.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/schedule/rank_sizes.h"

namespace ballast::schedule {
namespace {

/// Largest buffer for gradients received from other ranks; larger gradients are summed in rounds.
constexpr Bytes kArriving = 32 * kMiB;
/// A host buffer of a step with at least kServes bytes also serves to fill and read the device;
/// else a buffer of at most kPassing bytes is added.
constexpr Bytes kServes = 256 * kKiB;
constexpr Bytes kPassing = 1 * kMiB;

class LayoutMaker {
 public:
  LayoutMaker(const Workload& workload, const Placement& placement, const Options& options)
      : work_(workload), place_(placement), options_(options), rank_(workload) {}

  Layout make() {
    homes();
    weight_passage();
    if (trains()) {
      state_passage();
      gradients();
      activations();
    } else {
      passing_activations();
    }
    batch();
    layout_.workspace = add("workspace", Tier::device, Kind::workspace, work_.workspace_bytes);
    passing_place();
    if (trains()) checkpoints();
    return std::move(layout_);
  }

 private:
  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(work_.blocks.size());
  }
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return place_.blocks[block]; }
  [[nodiscard]] bool trains() const { return options_.purpose == Purpose::training; }

  BufferId add(std::string name, Tier tier, Kind kind, Bytes bytes) {
    layout_.buffers.push_back({std::move(name), tier, kind, bytes});
    return static_cast<BufferId>(layout_.buffers.size() - 1);
  }

  std::vector<BufferId> add_slots(std::string_view name, Tier tier, Kind kind, Bytes bytes,
                                  std::size_t count) {
    std::vector<BufferId> slots;
    if (bytes == 0) return slots;
    slots.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      slots.push_back(add(fmt::format("{} {}", name, i), tier, kind, bytes));
    }
    return slots;
  }

  struct Need {
    Bytes bytes = 0;        ///< of the largest
    std::size_t count = 0;  ///< of blocks
  };

  /// The number of blocks for which `counts` holds and the largest `size` of one.
  template <class Size, class Counts>
  [[nodiscard]] Need need(Size size, Counts counts) const {
    Need found;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!counts(b)) continue;
      found.bytes = std::max(found.bytes, size(b));
      ++found.count;
    }
    return found;
  }

  void homes() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      const std::string& name = work_.blocks[b].name;
      layout_.weight_home.push_back(
          add(name + " weights", at(b).weights, Kind::weights, rank_.weights(b)));
      if (!trains()) continue;
      layout_.state_home.push_back(add_states(b, name + " states", at(b).optimizer, Kind::states));
      undo(b, name);
    }
  }

  /// One buffer for each sub-group.
  std::vector<BufferId> add_states(std::uint32_t b, const std::string& name, Tier tier, Kind kind) {
    const auto groups = static_cast<std::uint32_t>(work_.blocks[b].sub_groups.size());
    std::vector<BufferId> buffers;
    for (std::uint32_t g = 0; g < groups; ++g) {
      buffers.push_back(add(groups == 1 ? name : fmt::format("{}, sub-group {}", name, g), tier,
                            kind, rank_.states(b, g)));
    }
    return buffers;
  }

  void checkpoints() {
    for (const BufferId home : layout_.weight_home) checkpoints_of(home);
    for (const auto& homes : layout_.state_home) {
      for (const BufferId home : homes) checkpoints_of(home);
    }
  }

  /// No plan uses these: a home and such a buffer change places (state/slots.h).
  void checkpoints_of(BufferId home) {
    const Buffer kept = layout_.buffers[home];
    if (kept.tier != Tier::nvme) return;
    for (std::uint32_t c = 0; c < options_.kept_checkpoints; ++c) {
      add(fmt::format("{} of checkpoint {}", kept.name, c), Tier::nvme, Kind::checkpoints,
          kept.bytes);
    }
  }

  void undo(std::uint32_t b, const std::string& name) {
    layout_.weight_undo.push_back(kNoBuffer);
    layout_.state_undo.emplace_back();
    if (!at(b).speculates) return;
    // The updated weights of a block are in host memory, wherever they live.
    const bool swaps_weights = at(b).weights == Tier::nvme;
    layout_.weight_undo.back() =
        add(name + " weights before the update", swaps_weights ? Tier::nvme : Tier::host,
            Kind::undo, swaps_weights ? rank_.weights(b) : rank_.updated_weights(b));
    layout_.state_undo.back() =
        add_states(b, name + " states before the update", at(b).optimizer, Kind::undo);
  }

  void weight_passage() {
    const auto passes = [this](std::uint32_t b) {
      return rank_.splits_weights(b) || at(b).weights != Tier::device;
    };
    const Need slots = need([this](std::uint32_t b) { return rank_.whole_weights(b); }, passes);
    const bool tied_in_transit = work_.tied && passes(0);
    const std::size_t wanted = options_.weight_slots + (tied_in_transit ? 1 : 0);
    layout_.weight_slots = add_slots("weights in transit", Tier::device, Kind::staging, slots.bytes,
                                     std::min(wanted, slots.count));
    const auto split_elsewhere = [this](std::uint32_t b) {
      return rank_.splits_weights(b) && at(b).weights != Tier::device;
    };
    const Need shares =
        need([this](std::uint32_t b) { return rank_.weight_share(b); }, split_elsewhere);
    layout_.share_slots = add_slots("shares of weights in transit", Tier::device, Kind::staging,
                                    shares.bytes, std::min<std::size_t>(2, shares.count));
    if (rank_.codes_weights()) {
      const Need codes = need([this](std::uint32_t b) { return rank_.whole_codes(b); },
                              [this](std::uint32_t b) { return rank_.splits_weights(b); });
      if (codes.bytes > 0) {
        layout_.codes = add("weight codes", Tier::device, Kind::workspace, codes.bytes);
      }
    }
    const auto on_host = [this](std::uint32_t b) {
      return at(b).weights == Tier::device ? rank_.updated_weights(b) : rank_.weights(b);
    };
    const Need staged = need(on_host, [this](std::uint32_t b) {
      const bool borrowed = at(b).weights == Tier::device && at(b).optimizer != Tier::device;
      return at(b).weights == Tier::nvme || borrowed;
    });
    layout_.weight_staging =
        add_slots("weight staging", Tier::host, Kind::staging, staged.bytes,
                  std::min<std::size_t>(options_.weight_staging, staged.count));
  }

  void state_passage() {
    std::vector<SwappedStates> swapped = swapped_states(work_, place_, options_, Pass::forward);
    const auto backward = swapped_states(work_, place_, options_, Pass::backward);
    swapped.insert(swapped.end(), backward.begin(), backward.end());
    std::vector<Bytes> sizes(std::min<std::size_t>(options_.state_staging, swapped.size()), 0);
    for (std::size_t i = 0; i < swapped.size(); ++i) {
      Bytes& size = sizes[i % sizes.size()];
      size = std::max(size, rank_.states(swapped[i].block, swapped[i].sub_group));
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      layout_.state_staging.push_back(
          add(fmt::format("state staging {}", i), Tier::host, Kind::staging, sizes[i]));
    }
  }

  void gradients() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      const std::string& name = work_.blocks[b].name;
      layout_.gradient.push_back(gradient_home(b, name + " gradient"));
      layout_.statistics_device.push_back(add(name + " gradient statistics on the device",
                                              Tier::device, Kind::batch, work_.statistics_bytes));
      layout_.statistics_host.push_back(
          add(name + " gradient statistics", Tier::host, Kind::batch, work_.statistics_bytes));
    }
    const auto whole = [this](std::uint32_t b) { return rank_.whole_gradient(b); };
    const Need packed = need(whole, [this](std::uint32_t b) {
      return rank_.splits_gradients() || at(b).optimizer != Tier::device;
    });
    layout_.gradient_slots = add_slots("gradients in transit", Tier::device, Kind::staging,
                                       packed.bytes, std::min<std::size_t>(2, packed.count));
    const Need swapped = need([this](std::uint32_t b) { return swapped_gradient_bytes(work_, b); },
                              [this](std::uint32_t b) { return swaps_gradient(place_, b); });
    layout_.gradient_staging =
        add_slots("gradient staging", Tier::host, Kind::staging, swapped.bytes,
                  std::min<std::size_t>(options_.gradient_staging, swapped.count));
    if (rank_.several()) {
      const Need all = need(whole, [](std::uint32_t) { return true; });
      const Bytes least = work_.world * kPage;
      layout_.arriving = add("gradients from other ranks", Tier::device, Kind::workspace,
                             std::clamp(all.bytes, least, std::max(least, kArriving)));
    }
    accumulators();
  }

  BufferId gradient_home(std::uint32_t b, std::string name) {
    if (swaps_gradient(place_, b)) {
      // An eager update takes it from staging.
      if (options_.update == Update::eager) return kNoBuffer;
      return add(std::move(name), Tier::nvme, Kind::gradients, swapped_gradient_bytes(work_, b));
    }
    const Tier side = at(b).optimizer == Tier::device ? Tier::device : Tier::host;
    const bool shard = side == Tier::device ? rank_.splits_gradients() : rank_.splits_states();
    return add(std::move(name), side, Kind::gradients,
               shard ? rank_.gradient_shard(b) : rank_.whole_gradient(b));
  }

  void accumulators() {
    if (options_.order == Order::layer_major) {
      const Need largest =
          need([this](std::uint32_t b) { return work_.blocks[b].accumulator_bytes; },
               [](std::uint32_t) { return true; });
      const BufferId shared =
          add("gradient accumulator", Tier::device, Kind::accumulators, largest.bytes);
      layout_.accumulator.assign(blocks(), shared);
    } else {
      for (const BlockWork& block : work_.blocks) {
        layout_.accumulator.push_back(add(block.name + " accumulator", Tier::device,
                                          Kind::accumulators, block.accumulator_bytes));
      }
    }
    if (!work_.tied) return;
    layout_.tied_accumulator =
        add("tied accumulator", Tier::device, Kind::accumulators, work_.tied_accumulator_bytes);
  }

  void activations() {
    const bool layer_major = options_.order == Order::layer_major;
    const std::uint32_t together = layer_major ? work_.micro_batches : 1;
    layout_.input_home.resize(blocks());
    layout_.intermediates.resize(blocks());
    std::size_t leaving = 0;
    std::size_t to_nvme = 0;
    for (std::uint32_t b = 1; b + 1 < blocks(); ++b) {
      const bool leaves = input_leaves(place_, b);
      leaving += leaves ? 1 : 0;
      to_nvme += leaves && at(b).activations == Tier::nvme ? together : 0;
      add_inputs(b, leaves ? at(b).activations : Tier::device, together);
      if (keeps_intermediates(place_, b)) {
        layout_.intermediates[b] =
            add_slots("intermediates of " + work_.blocks[b].name, Tier::device, Kind::intermediates,
                      work_.blocks[b].intermediate_bytes, together);
      }
    }
    if (leaving == 0) add_inputs(blocks() - 1, Tier::device, together);
    if (leaving > 0) {
      layout_.activation_slots = add_slots("activations in transit", Tier::device,
                                           Kind::activations, work_.activation_bytes, together + 2);
    }
    layout_.activation_staging =
        add_slots("activation staging", Tier::host, Kind::staging, swapped_input_bytes(work_),
                  std::min<std::size_t>(options_.activation_staging, to_nvme));
    layout_.flow = add_slots("activation gradient", Tier::device, Kind::activations,
                             work_.activation_bytes, together);
  }

  /// A block's outputs while those of the block before are read, one after the other.
  void passing_activations() {
    const bool layer_major = options_.order == Order::layer_major;
    const std::uint32_t together = layer_major ? work_.evaluation_micro_batches : 1;
    layout_.input_home.resize(blocks());
    // With one more than are read, or fewer for a model without layers.
    const std::uint32_t count = std::min(together + 1, together * (blocks() - 1));
    layout_.activation_slots =
        add_slots("activations", Tier::device, Kind::activations, work_.activation_bytes, count);
  }

  void add_inputs(std::uint32_t block, Tier tier, std::uint32_t count) {
    const Bytes bytes = tier == Tier::nvme ? swapped_input_bytes(work_) : work_.activation_bytes;
    for (std::uint32_t m = 0; m < count; ++m) {
      layout_.input_home[block].push_back(
          add(fmt::format("input of {}, {}", work_.blocks[block].name, m), tier, Kind::activations,
              bytes));
    }
  }

  void batch() {
    const std::uint32_t count = trains() ? work_.micro_batches : work_.evaluation_micro_batches;
    layout_.batch_host = add_slots("batch", Tier::host, Kind::batch, work_.batch_bytes, count);
    layout_.batch_device =
        add_slots("batch on the device", Tier::device, Kind::batch, work_.batch_bytes, count);
    layout_.losses_device =
        add("losses on the device", Tier::device, Kind::batch, work_.losses_bytes);
    layout_.losses_host = add("losses", Tier::host, Kind::batch, work_.losses_bytes);
    layout_.verdict = add("verdict", Tier::host, Kind::batch, 0);
  }

  void passing_place() {
    const Need weights = need([this](std::uint32_t b) { return rank_.weights(b); },
                              [this](std::uint32_t b) { return at(b).weights == Tier::device; });
    const Need states =
        need([this](std::uint32_t b) { return rank_.states(b, 0); },  // the first is the largest
             [this](std::uint32_t b) { return trains() && at(b).optimizer == Tier::device; });
    const Bytes largest = std::max(weights.bytes, states.bytes);
    if (largest == 0) return;
    for (const auto* places :
         {&layout_.weight_staging, &layout_.state_staging, &layout_.activation_staging,
          &layout_.gradient_staging, &layout_.gradient}) {
      for (const BufferId id : *places) {
        if (id == kNoBuffer) continue;
        const Buffer& buffer = layout_.buffers[id];
        if (buffer.tier != Tier::host || buffer.bytes < std::min(largest, kServes)) continue;
        layout_.passing_place = id;
        return;
      }
    }
    layout_.passing_place = add("staging for data on the device", Tier::host, Kind::staging,
                                std::min(largest, kPassing));
  }

  const Workload& work_;
  const Placement& place_;
  const Options& options_;
  RankSizes rank_;
  Layout layout_;
};

}  // namespace

bool input_leaves(const Placement& placement, std::uint32_t block) {
  return is_layer(block, placement.blocks.size()) &&
         placement.blocks[block].activations != Tier::device;
}

bool swaps_gradient(const Placement& placement, std::uint32_t block) {
  const BlockPlacement& place = placement.blocks[block];
  return place.optimizer != Tier::device && place.gradients == Tier::nvme;
}

bool keeps_intermediates(const Placement& placement, std::uint32_t block) {
  return is_layer(block, placement.blocks.size()) && placement.blocks[block].keeps_intermediates;
}

Pass update_pass(const Placement& placement, const Options& options, std::uint32_t block) {
  const bool gated = options.update == Update::gated && !placement.blocks[block].speculates;
  return gated ? Pass::forward : Pass::backward;
}

std::vector<SwappedStates> swapped_states(const Workload& workload, const Placement& placement,
                                          const Options& options, Pass pass) {
  std::vector<SwappedStates> swapped;
  const auto blocks = static_cast<std::uint32_t>(placement.blocks.size());
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const std::uint32_t b = pass == Pass::forward ? i : blocks - 1 - i;
    if (placement.blocks[b].optimizer != Tier::nvme) continue;
    if (update_pass(placement, options, b) != pass) continue;
    const auto groups = static_cast<std::uint32_t>(workload.blocks[b].sub_groups.size());
    for (std::uint32_t g = 0; g < groups; ++g) swapped.push_back({b, g});
  }
  return swapped;
}

Bytes swapped_input_bytes(const Workload& workload) {
  return round_up(workload.activation_bytes, kPage);
}

Bytes swapped_gradient_bytes(const Workload& workload, std::uint32_t block) {
  return round_up(RankSizes(workload).updated_gradient(block), kPage);
}

Layout make_layout(const Workload& workload, const Placement& placement, const Options& options) {
  return LayoutMaker(workload, placement, options).make();
}

}  // namespace ballast::schedule
