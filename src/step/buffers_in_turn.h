#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/step/labels.h"

namespace ballast::step {

/// Hands out buffers in turn.
class RoundRobin {
 public:
  explicit RoundRobin(const std::vector<BufferId>& buffers) : buffers_(buffers) {}
  BufferId next() { return buffers_[position_++ % buffers_.size()]; }

 private:
  const std::vector<BufferId>& buffers_;
  std::size_t position_ = 0;
};

/// An LRU cache of buffers for blocks in transit: the least recently used buffer is taken for the
/// next block, and a block that is still in a buffer is not moved again.
class BufferCache {
 public:
  explicit BufferCache(const std::vector<BufferId>& buffers) {
    slots_.reserve(buffers.size());
    for (const BufferId id : buffers) slots_.push_back({id, kEmpty, {}});
  }

  struct Entry {
    BufferId buffer = kNoBuffer;
    bool fill = false;  ///< the data must be moved there first
    /// The data are already there if this condition holds.
    std::optional<Condition> unless = {};
  };

  /// Returns the buffer of `block`, which becomes the most recently used one. `when`: the condition
  /// under which the data are needed and will be there.
  Entry take(std::uint32_t block, Condition when = {}) {
    auto found = std::find_if(slots_.begin(), slots_.end(),
                              [&](const Slot& slot) { return slot.block == block; });
    const bool there = found != slots_.end();
    if (!there) found = slots_.begin();
    Slot slot = *found;
    Entry taken = {slot.buffer, !there || (!slot.when.always() && slot.when != when)};
    if (there && taken.fill) taken.unless = slot.when;
    slot.block = block;
    if (taken.fill) slot.when = when;
    slots_.erase(found);
    slots_.push_back(slot);
    return taken;
  }

  /// Marks the buffer of `block` as incomplete.
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
    Condition when;
  };
  std::vector<Slot> slots_;  ///< least recently used first
};

}  // namespace ballast::step
