#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/step/buffers_in_turn.h"
#include "src/step/move_context.h"

namespace ballast::step {

/// Moves weights between their homes and the places where passes and updates need them.
class WeightMover : public Mover {
 public:
  explicit WeightMover(MoveContext& plan);

  /// Returns the device buffer with the whole weights of `block`, dequantised if necessary; moves
  /// them there if necessary.
  BufferId on_device(std::uint32_t block) { return on_device(block, plan_.for_pass(block)); }
  /// Returns the blocks that compute rows of `routing` and have buffers for weights that move
  /// before `router` has chosen.
  [[nodiscard]] ProgramIndex::Blocks blocks_ahead(std::uint32_t router,
                                                  model::ValueId routing) const;
  /// Moves weights to the device if their block had rows in the preceding micro-batch or step.
  void prefetch(std::uint32_t block);

  // For other movers. `when`: the condition under which weights are needed.

  /// Returns the device buffer with the whole weights of `block` as stored.
  BufferId kept_on_device(std::uint32_t block, Condition when);
  /// Returns the host buffer with weights that are on the host or on NVMe.
  BufferId on_host(std::uint32_t block, Condition when);
  /// Fetches weights from NVMe unless an update or an earlier fetch left them in staging. If the
  /// trained ones are in host memory, only the frozen ones pass through staging.
  BufferId in_staging(std::uint32_t block, Condition when);
  /// Takes the staging buffer of `block` without moving weights there.
  BufferId take_staging(std::uint32_t block, Condition when = {}) {
    return staging_.take(block, when).buffer;
  }
  /// The device buffers for weights in transit of this block: whole ones or shares.
  [[nodiscard]] BufferCache& slots_of(std::uint32_t block) {
    return rank_.shards_weights(block) ? caches_of(block).share_slots : caches_of(block).slots;
  }
  /// A copy of weights.
  struct Copy {
    Use from;
    Use to;
    Bytes bytes = 0;
    Condition when;
    std::optional<Condition> unless = {};
    Bytes offset = 0;  ///< see Operation
  };
  void copy(Action action, std::uint32_t block, const Copy& copy);
  /// Brings the frozen weights; the trained ones follow separately.
  void bring_frozen(const BufferCache::Entry& place, Action action, std::uint32_t block,
                    BufferId from, Condition when);
  /// Gathers split weights from this rank's group. If `from` is `to`, gathers updated shards in
  /// place from all ranks that keep the same weights; never as codes, because the next update reads
  /// them.
  void gather(std::uint32_t block, BufferId from, BufferId to, Condition when,
              std::optional<Condition> unless = {});

 private:
  /// The buffers of a device that blocks use in turn.
  struct DeviceCaches {
    BufferCache slots;
    BufferCache share_slots;
    BufferCache dequantized;
  };
  [[nodiscard]] DeviceCaches& caches_of(std::uint32_t block) {
    return caches_[placed_.device_of(block)];
  }
  BufferId on_device(std::uint32_t block, Condition when);
  BufferId share_on_device(std::uint32_t block, Condition when);
  /// Brings all weights that a rank keeps to a place that lacks them.
  void bring(const BufferCache::Entry& place, Action action, std::uint32_t block, BufferId from,
             Condition when);

  std::vector<DeviceCaches> caches_;  ///< by device
  BufferCache staging_;
};

}  // namespace ballast::step
