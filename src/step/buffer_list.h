#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/plan/plan.h"

#include "src/step/plan_types.h"

namespace ballast::step {

/// A list of buffers under construction: each separately, or one per tier, kind and device if only
/// their sums are needed. Arguments `device` do not count for buffers on NVMe.
class BufferList {
 public:
  BufferList(bool merges, std::uint32_t devices)
      : merges_(merges), devices_(devices), merged_(devices, none()) {}

  [[nodiscard]] bool merges() const { return merges_; }

  [[nodiscard]] const Buffer& operator[](BufferId id) const { return buffers_[id]; }
  [[nodiscard]] std::vector<Buffer> take() { return std::move(buffers_); }
  /// The largest host buffer for data in transit, if buffers are merged.
  [[nodiscard]] Bytes largest_place() const { return largest_place_; }
  /// If buffers are merged: the merged NVMe buffer of a kind, or kNoBuffer.
  [[nodiscard]] BufferId merged_on_nvme(Kind kind) const {
    return merged_.front()
        .at(static_cast<std::size_t>(Tier::nvme))
        .at(static_cast<std::size_t>(kind));
  }

  BufferId add(std::string name, Tier tier, Kind kind, Bytes bytes, std::uint8_t device = 0) {
    if (merges_) return merge(tier, kind, bytes, 1, device);
    if (tier == Tier::device && devices_ > 1) name += fmt::format(", device {}", device);
    buffers_.push_back({std::move(name), tier, kind, bytes, device_of(tier, device)});
    return static_cast<BufferId>(buffers_.size() - 1);
  }

  /// Adds `count` equal buffers to the merged buffer of their tier, kind and device.
  BufferId merge(Tier tier, Kind kind, Bytes bytes, std::size_t count, std::uint8_t device = 0) {
    const bool place = kind == Kind::staging || kind == Kind::gradients;
    if (tier == Tier::host && place) largest_place_ = std::max(largest_place_, bytes);
    const std::uint8_t of = device_of(tier, device);
    BufferId& id =
        merged_.at(of).at(static_cast<std::size_t>(tier)).at(static_cast<std::size_t>(kind));
    if (id == kNoBuffer) {
      id = static_cast<BufferId>(buffers_.size());
      buffers_.push_back({{}, tier, kind, 0, of});
    }
    buffers_[id].bytes += count * round_up(bytes, kPage);
    return id;
  }

  std::vector<BufferId> add_slots(std::string_view name, Tier tier, Kind kind, Bytes bytes,
                                  std::size_t count, std::uint8_t device = 0) {
    if (bytes == 0) return {};
    return add_equal([name](std::size_t i) { return fmt::format("{} {}", name, i); }, tier, kind,
                     bytes, count, device);
  }

  /// If buffers are merged, one represents all.
  template <class Name>
  std::vector<BufferId> add_equal(Name name, Tier tier, Kind kind, Bytes bytes, std::size_t count,
                                  std::uint8_t device = 0) {
    if (count == 0) return {};
    if (merges_) return {merge(tier, kind, bytes, count, device)};
    std::vector<BufferId> buffers;
    buffers.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
      buffers.push_back(add(name(i), tier, kind, bytes, device));
    return buffers;
  }

 private:
  static constexpr std::size_t kKinds = static_cast<std::size_t>(Kind::checkpoints) + 1;
  using Merged = std::array<std::array<BufferId, kKinds>, kTiers.size()>;
  static std::uint8_t device_of(Tier tier, std::uint8_t device) {
    return tier == Tier::nvme ? std::uint8_t{0} : device;
  }
  static Merged none() {
    Merged ids;
    for (auto& of_tier : ids) of_tier.fill(kNoBuffer);
    return ids;
  }

  bool merges_;
  std::uint32_t devices_;
  std::vector<Buffer> buffers_;
  Bytes largest_place_ = 0;
  std::vector<Merged> merged_;  ///< by device
};

}  // namespace ballast::step
