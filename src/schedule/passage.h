#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Hands out buffers in turn.
class Ring {
 public:
  explicit Ring(const std::vector<BufferId>& buffers) : buffers_(buffers) {}
  BufferId next() { return buffers_[position_++ % buffers_.size()]; }

 private:
  const std::vector<BufferId>& buffers_;
  std::size_t position_ = 0;
};

/// An LRU cache of buffers for data of blocks in transit: the least recently used one is taken for
/// the next block, and a block that is still there is not moved again.
class Passage {
 public:
  explicit Passage(const std::vector<BufferId>& buffers) {
    slots_.reserve(buffers.size());
    for (const BufferId id : buffers) slots_.push_back({id, kEmpty, kAlways});
  }

  /// Data of the block are there without a condition.
  static constexpr std::uint32_t kAlways = ~0U;

  /// The buffer of `block` and whether it must be filled first. Marks it most recently used.
  /// `when`: the number of the condition under which the data are needed and will be there.
  std::pair<BufferId, bool> take(std::uint32_t block, std::uint32_t when = kAlways) {
    auto found = std::find_if(slots_.begin(), slots_.end(),
                              [&](const Slot& slot) { return slot.block == block; });
    const bool fill = found == slots_.end() || (found->when != kAlways && found->when != when);
    if (found == slots_.end()) found = slots_.begin();
    Slot slot = *found;
    slot.block = block;
    if (fill) slot.when = when;
    slots_.erase(found);
    slots_.push_back(slot);
    return {slot.buffer, fill};
  }

  /// The buffer of `block` has not all of its data any more.
  void forget(std::uint32_t block) {
    for (Slot& slot : slots_) {
      if (slot.block == block) slot.block = kEmpty;
    }
  }

 private:
  static constexpr std::uint32_t kEmpty = ~0U;
  struct Slot {
    BufferId buffer;
    std::uint32_t block;
    std::uint32_t when = kAlways;
  };
  std::vector<Slot> slots_;  ///< least recently used first
};

}  // namespace ballast::schedule
