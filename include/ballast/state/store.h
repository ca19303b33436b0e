#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/device/device.h"
#include "ballast/memory/ledger.h"
#include "ballast/plan/plan.h"
#include "ballast/state/swap_plan.h"
#include "ballast/state/swap_space.h"

namespace ballast::state {

/// The extent of the swap space that each home uses. A checkpoint keeps extents unchanged: the next
/// write of a home goes to another one of the same size, and the old one becomes free when no
/// checkpoint keeps it (redirect on write). Thread-safe for calls about different homes.
class HomeExtents {
 public:
  HomeExtents() = default;
  /// `extents`: sizes. The first `homes` extents belong to the homes in order, the others are
  /// spare.
  HomeExtents(std::span<const Bytes> extents, std::size_t homes);

  /// Returns the extent with the last write of a home.
  [[nodiscard]] std::size_t extent(std::size_t home) const;
  /// Returns the extent for its next write, which becomes extent(home). Throws Error(state) if
  /// checkpoints keep all extents of its size.
  std::size_t for_writing(std::size_t home);
  /// Swaps the extents of two homes of equal size.
  void exchange(std::size_t home, std::size_t other);

  /// Keeps the extents of these homes for `checkpoint` until it is released.
  void keep(std::uint64_t checkpoint, std::span<const std::size_t> homes);
  /// Releases the extents of a checkpoint. Does nothing for an unknown one.
  void release(std::uint64_t checkpoint);
  [[nodiscard]] std::vector<std::uint64_t> checkpoints() const;

  /// Replaces the state after construction: the listed homes use these extents (home, extent),
  /// other homes any free ones, and checkpoints keep theirs. Throws Error(state) if that is
  /// impossible.
  void restore(std::span<const std::pair<std::size_t, std::size_t>> homes,
               const std::map<std::uint64_t, std::vector<std::size_t>>& kept);

 private:
  std::size_t take_free(Bytes size);

  mutable std::mutex mutex_;
  std::vector<Bytes> sizes_;          ///< by extent
  std::vector<std::size_t> extents_;  ///< by home
  std::vector<bool> in_use_;          ///< by extent: used by a home
  std::vector<std::size_t> keepers_;  ///< by extent: number of checkpoints that keep it
  std::map<Bytes, std::vector<std::size_t>> free_;
  std::map<std::uint64_t, std::vector<std::size_t>> kept_;  ///< by checkpoint
};

class HomeExtents;

/// Returns the sizes of a schedule's NVMe buffers for plan_swap(): first those used by plans, in
/// order, then those for checkpoints.
std::vector<Bytes> swap_extents(const plan::Schedule& schedule);

/// Plans the swap space of a schedule. If the files of `here` fit, the plan reuses them and
/// `reused` becomes true. Empty if nothing is on NVMe. `kept`: number of checkpoints that keep
/// states there. Throws like plan_swap().
std::optional<SwapPlan> plan_swap(const SwapOptions& options, const plan::Schedule& schedule,
                                  std::uint32_t kept, const SwapImage& here, bool& reused);

/// An extent of the swap space and the checksums of its content.
struct KeptExtent {
  std::size_t extent = 0;
  std::vector<std::uint64_t> checksums;  ///< XXH3 of each kChunk
};
/// The extents that each checkpoint keeps.
using KeptExtents = std::map<std::uint64_t, std::vector<std::size_t>>;

/// Allocates every buffer of a schedule (device, pinned host pool, swap space) and moves whole
/// buffers between host memory and the swap space. The devices must outlive it.
class Store {
 public:
  /// `devices`: by plan::Buffer::device; each pins its host buffers, so that a GPU has them on its
  /// NUMA node. `swap`: laid out for swap_extents(schedule); empty if there are none. Throws the
  /// Error of the tier that cannot allocate.
  Store(const plan::Schedule& schedule, std::vector<device::Device*> devices,
        const std::optional<SwapPlan>& swap);
  ~Store();

  /// Returns the first `bytes` of a buffer. Throws Error(state) for a buffer of another tier.
  [[nodiscard]] HostBytes host(plan::BufferId id, Bytes bytes) const;
  [[nodiscard]] DeviceBytes device(plan::BufferId id, Bytes bytes) const;

  /// Starts to read a whole NVMe home into `data`, verified against the last written version.
  /// `ahead`: a prefetch that no operation waits for yet. The home's last writeback must have
  /// ended.
  [[nodiscard]] std::unique_ptr<SwapTransfer> fetch(plan::BufferId home, HostBytes data,
                                                    bool ahead = false);
  /// Starts to write `data` to a whole NVMe home as its next version. `zeros_from`: all bytes from
  /// there on are zero, so that they need not be written to a new home.
  [[nodiscard]] std::unique_ptr<SwapTransfer> writeback(plan::BufferId home, HostBytes data,
                                                        Bytes zeros_from = kNoZeros);

  /// Swaps the extents of two NVMe homes of equal size, with their content and versions. No
  /// transfer of either may be running.
  void exchange(plan::BufferId home, plan::BufferId other);

  /// Keeps the content of these NVMe homes for `checkpoint`: later writes of a home go to another
  /// extent. No transfer may be running. Returns when the content is on the disks. Throws
  /// Error(io).
  std::vector<KeptExtent> keep(std::uint64_t checkpoint, std::span<const plan::BufferId> homes);
  /// Frees the extents of a checkpoint. Does nothing for an unknown one.
  void release(std::uint64_t checkpoint);
  /// Returns the checkpoints that keep extents.
  [[nodiscard]] std::vector<std::uint64_t> kept() const;
  /// Declares what existing swap files contain: these homes, and the extents kept by checkpoints.
  /// Call it before any transfer.
  void restore(std::span<const std::pair<plan::BufferId, KeptExtent>> homes,
               const KeptExtents& kept);

  /// Returns the bytes on a tier, of all devices together.
  [[nodiscard]] Bytes allocated(Tier tier) const;
  /// Returns the bytes of host memory that are pinned.
  [[nodiscard]] Bytes pinned() const;
  /// Returns nullptr without NVMe buffers.
  [[nodiscard]] const SwapSpace* swap_space() const { return swap_.get(); }

 private:
  struct Allocation {
    HostBytes host;
    DeviceBytes device;
    std::optional<std::size_t> home;  ///< number of an NVMe buffer
    std::uint64_t version = 0;        ///< number of writebacks of an NVMe buffer
  };

  void allocate_on_host(const plan::Schedule& schedule);

  std::vector<device::Device*> devices_;
  memory::HostPool pool_;
  std::vector<std::unique_ptr<device::Pin>> pins_;  ///< pin the whole pool; destroyed before it
  std::vector<Allocation> allocations_;
  std::unique_ptr<HomeExtents> extents_;  ///< extents of the homes
  std::unique_ptr<SwapSpace> swap_;       ///< refers to the pool; destroyed first
};

}  // namespace ballast::state
