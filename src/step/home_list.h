#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/build.h"
#include "ballast/step/rank_sizes.h"

#include "src/step/buffer_list.h"
#include "src/step/layout.h"
#include "src/step/placement_rules.h"
#include "src/step/plan_types.h"

namespace ballast::step {

/// A layout in the making, of which this class knows the homes of weights and states, what a
/// rollback needs of them, and what checkpoints keep on NVMe.
class HomeList : protected BufferList {
 protected:
  HomeList(const Problem& problem, const Placement& placement, const Options& options, bool merges)
      : BufferList(merges),
        problem_(problem),
        place_(placement),
        options_(options),
        rank_(problem) {}

  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(problem_.blocks.size());
  }
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return place_.blocks[block]; }
  [[nodiscard]] bool trains() const { return options_.purpose == Purpose::training; }
  [[nodiscard]] bool is_trained(std::uint32_t block) const {
    return !problem_.blocks[block].is_frozen();
  }
  /// Whether its states are below the device.
  [[nodiscard]] bool updates_below(std::uint32_t block) const {
    return is_trained(block) && at(block).optimizer != Tier::device;
  }
  [[nodiscard]] bool speculates(std::uint32_t block) const {
    return is_trained(block) && at(block).speculates;
  }

  /// "layer 3 weights", unless nobody reads it.
  [[nodiscard]] std::string name_of(std::uint32_t block, std::string_view what) const {
    return merges_ ? std::string() : fmt::format("{} {}", problem_.name_of(block), what);
  }

  void homes() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      const bool split = splits_home(problem_, place_, options_, b);
      const BufferId weights = add(name_of(b, split ? "frozen weights" : "weights"), at(b).weights,
                                   Kind::weights, rank_.weights(b) - trained_bytes(b));
      const BufferId trained =
          split ? add(name_of(b, "weights"), trained_tier(at(b)), Kind::weights, trained_bytes(b))
                : kNoBuffer;
      if (merges_) {
        if (trains()) merge_states(b);
        continue;
      }
      layout_.weight_home.push_back(weights);
      layout_.trained_home.push_back(trained);
      if (!trains()) continue;
      layout_.state_home.push_back(
          add_states(b, name_of(b, "states"), at(b).optimizer, Kind::states));
      undo(b);
    }
  }

  /// No plan uses these: a home and such a buffer change places (state/slots.h).
  void checkpoints() {
    if (options_.kept_checkpoints == 0) return;
    if (merges_) {
      for (const Kind kind : {Kind::weights, Kind::states}) {
        const BufferId homes = merged(Tier::nvme, kind);
        if (homes == kNoBuffer) continue;
        const Bytes unchanged = kind == Kind::weights ? frozen_on_nvme() : 0;
        const Bytes bytes = buffers_[homes].bytes - unchanged;
        if (bytes > 0) merge(Tier::nvme, Kind::checkpoints, bytes, extents_for_checkpoints());
      }
      return;
    }
    std::vector<BufferId> homes;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      const BufferId trained = layout_.trained_home[b];
      if (is_trained(b)) homes.push_back(trained == kNoBuffer ? layout_.weight_home[b] : trained);
    }
    for (const auto& states : layout_.state_home) {
      homes.insert(homes.end(), states.begin(), states.end());
    }
    for (const BufferId home : homes) {
      const Buffer kept = buffers_[home];
      if (kept.tier != Tier::nvme) continue;
      add_equal([&kept](std::size_t c) { return fmt::format("{} of checkpoint {}", kept.name, c); },
                Tier::nvme, Kind::checkpoints, kept.bytes, options_.kept_checkpoints);
    }
    if (extents_for_checkpoints() == options_.kept_checkpoints) return;
    // At the end: swap files without them then only have to grow.
    for (const BufferId home : homes) {
      const Buffer kept = buffers_[home];
      if (kept.tier != Tier::nvme) continue;
      add(fmt::format("{} of a new checkpoint", kept.name), Tier::nvme, Kind::checkpoints,
          kept.bytes);
    }
  }

  const Problem& problem_;
  const Placement& place_;
  const Options& options_;
  RankSizes rank_;
  Layout layout_;

 private:
  /// For each home. A checkpoint that is written while training continues needs its own, because
  /// the older ones stay until it is complete.
  [[nodiscard]] std::uint32_t extents_for_checkpoints() const {
    return options_.kept_checkpoints +
           (written_in_background(place_, options_.kept_checkpoints) ? 1 : 0);
  }

  /// Of the home of the trained weights alone; 0: they have none.
  [[nodiscard]] Bytes trained_bytes(std::uint32_t b) const {
    return splits_home(problem_, place_, options_, b) ? rank_.updated_by_all(b) : 0;
  }

  /// States and undo buffers, without lists of them.
  void merge_states(std::uint32_t b) {
    const auto groups = static_cast<std::uint32_t>(problem_.blocks[b].sub_groups.size());
    for (std::uint32_t g = 0; g < groups; ++g) {
      merge(at(b).optimizer, Kind::states, rank_.states(b, g), 1);
      if (speculates(b)) merge(at(b).optimizer, Kind::undo, rank_.states(b, g), 1);
    }
    if (speculates(b)) merge(undo_tier(b), Kind::undo, undo_bytes(b), 1);
  }

  /// One buffer for each sub-group.
  std::vector<BufferId> add_states(std::uint32_t b, const std::string& name, Tier tier, Kind kind) {
    const auto groups = static_cast<std::uint32_t>(problem_.blocks[b].sub_groups.size());
    std::vector<BufferId> buffers;
    for (std::uint32_t g = 0; g < groups; ++g) {
      buffers.push_back(add(groups == 1 ? name : fmt::format("{}, sub-group {}", name, g), tier,
                            kind, rank_.states(b, g)));
    }
    return buffers;
  }

  /// Weights that are never written again, in whole pages.
  [[nodiscard]] Bytes frozen_on_nvme() const {
    Bytes sum = 0;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (at(b).weights != Tier::nvme) continue;
      const Bytes trained = trained_bytes(b);
      const bool counts = !is_trained(b) || trained > 0;
      sum += counts ? round_up(rank_.weights(b) - trained, kPage) : 0;
    }
    return sum;
  }

  /// The updated weights of a block are in host memory, wherever they live.
  [[nodiscard]] Tier undo_tier(std::uint32_t b) const {
    if (trained_bytes(b) > 0) return trained_tier(at(b));
    return at(b).weights == Tier::nvme ? Tier::nvme : Tier::host;
  }
  [[nodiscard]] Bytes undo_bytes(std::uint32_t b) const {
    if (undo_tier(b) == Tier::host) return rank_.updated_weights(b);
    return trained_bytes(b) > 0 ? trained_bytes(b) : rank_.weights(b);
  }

  void undo(std::uint32_t b) {
    layout_.weight_undo.push_back(kNoBuffer);
    layout_.state_undo.emplace_back();
    if (!speculates(b)) return;
    layout_.weight_undo.back() =
        add(name_of(b, "weights before the update"), undo_tier(b), Kind::undo, undo_bytes(b));
    layout_.state_undo.back() =
        add_states(b, name_of(b, "states before the update"), at(b).optimizer, Kind::undo);
  }
};

}  // namespace ballast::step
