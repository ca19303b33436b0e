#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/plan/plan.h"

#include "src/step/plan_types.h"

namespace ballast::step {

/// A list of buffers under construction: each separately, or one per tier and kind if only their
/// sums are needed.
class BufferList {
 public:
  explicit BufferList(bool merges) : merges_(merges) {}

  [[nodiscard]] bool merges() const { return merges_; }

  [[nodiscard]] const Buffer& operator[](BufferId id) const { return buffers_[id]; }
  [[nodiscard]] std::vector<Buffer> take() { return std::move(buffers_); }
  /// The largest host buffer for data in transit, if buffers are merged.
  [[nodiscard]] Bytes largest_place() const { return largest_place_; }
  /// If buffers are merged: the merged buffer of a tier and kind, or kNoBuffer.
  [[nodiscard]] BufferId merged(Tier tier, Kind kind) const {
    return merged_.at(static_cast<std::size_t>(tier)).at(static_cast<std::size_t>(kind));
  }

  BufferId add(std::string name, Tier tier, Kind kind, Bytes bytes) {
    if (merges_) return merge(tier, kind, bytes, 1);
    buffers_.push_back({std::move(name), tier, kind, bytes});
    return static_cast<BufferId>(buffers_.size() - 1);
  }

  /// Adds `count` equal buffers to the merged buffer of their tier and kind.
  BufferId merge(Tier tier, Kind kind, Bytes bytes, std::size_t count) {
    const bool place = kind == Kind::staging || kind == Kind::gradients;
    if (tier == Tier::host && place) largest_place_ = std::max(largest_place_, bytes);
    BufferId& id = merged_.at(static_cast<std::size_t>(tier)).at(static_cast<std::size_t>(kind));
    if (id == kNoBuffer) {
      id = static_cast<BufferId>(buffers_.size());
      buffers_.push_back({{}, tier, kind, 0});
    }
    buffers_[id].bytes += count * round_up(bytes, kPage);
    return id;
  }

  std::vector<BufferId> add_slots(std::string_view name, Tier tier, Kind kind, Bytes bytes,
                                  std::size_t count) {
    if (bytes == 0) return {};
    return add_equal([name](std::size_t i) { return fmt::format("{} {}", name, i); }, tier, kind,
                     bytes, count);
  }

  /// If buffers are merged, one represents all.
  template <class Name>
  std::vector<BufferId> add_equal(Name name, Tier tier, Kind kind, Bytes bytes, std::size_t count) {
    if (count == 0) return {};
    if (merges_) return {merge(tier, kind, bytes, count)};
    std::vector<BufferId> buffers;
    buffers.reserve(count);
    for (std::size_t i = 0; i < count; ++i) buffers.push_back(add(name(i), tier, kind, bytes));
    return buffers;
  }

 private:
  static constexpr std::size_t kKinds = static_cast<std::size_t>(Kind::checkpoints) + 1;
  static std::array<std::array<BufferId, kKinds>, kTiers.size()> none() {
    std::array<std::array<BufferId, kKinds>, kTiers.size()> ids;
    for (auto& of_tier : ids) of_tier.fill(kNoBuffer);
    return ids;
  }

  bool merges_;
  std::vector<Buffer> buffers_;
  Bytes largest_place_ = 0;
  std::array<std::array<BufferId, kKinds>, kTiers.size()> merged_ = none();
};

}  // namespace ballast::step
