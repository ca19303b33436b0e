#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ballast/device/device.h"
#include "ballast/memory/host_pool.h"
#include "ballast/plan/plan.h"
#include "ballast/state/swap_plan.h"
#include "ballast/state/swap_space.h"

namespace ballast::state {

class Slots;

/// Sizes of a schedule's NVMe buffers, for plan_swap(): first those that plans use, in order, then
/// those for checkpoints.
std::vector<Bytes> swap_extents(const plan::Schedule& schedule);

/// Lays out the swap space of a schedule, or goes on with the files of `here` if they fit: `reused`
/// becomes true. Empty if nothing is on NVMe. `kept`: number of checkpoints that keep states there.
/// Throws like plan_swap().
std::optional<SwapPlan> plan_swap(const SwapOptions& options, const plan::Schedule& schedule,
                                  std::uint32_t kept, const SwapImage& here, bool& reused);

/// What an extent of the swap space holds.
struct KeptExtent {
  std::size_t extent = 0;
  std::vector<std::uint64_t> checksums;  ///< XXH3 of each kChunk
};
/// By checkpoint: the extents that it keeps.
using KeptExtents = std::map<std::uint64_t, std::vector<std::size_t>>;

/// Allocates every buffer of a schedule (device, pinned host pool, swap space) and moves whole
/// buffers between host memory and the swap space. The device must outlive it.
class Store {
 public:
  /// `swap` is laid out for swap_extents(schedule); not needed if that is empty. Throws the
  /// Error of the tier that cannot allocate.
  Store(const plan::Schedule& schedule, device::Device& device,
        const std::optional<SwapPlan>& swap);
  ~Store();

  /// The first `bytes` of a buffer. Throws Error(state) for a buffer of another tier.
  [[nodiscard]] HostBytes host(plan::BufferId id, Bytes bytes) const;
  [[nodiscard]] DeviceBytes device(plan::BufferId id, Bytes bytes) const;

  /// Starts to read a whole NVMe home into `data`, verified against the last written version.
  /// `ahead`: no operation waits for it yet. The home's last writeback must have ended.
  [[nodiscard]] std::unique_ptr<SwapTransfer> fetch(plan::BufferId home, HostBytes data,
                                                    bool ahead = false);
  /// Starts to write `data` to a whole NVMe home as the next version. From byte `zeros_from` on all
  /// are zero, as far as the caller knows: they need not be written to a new home.
  [[nodiscard]] std::unique_ptr<SwapTransfer> writeback(plan::BufferId home, HostBytes data,
                                                        Bytes zeros_from = kNoZeros);

  /// Exchanges the places of two NVMe homes of equal size, each with its content and version. No
  /// transfer of either may be running.
  void exchange(plan::BufferId home, plan::BufferId other);

  /// From now on the content of these NVMe homes stays where it is, for `checkpoint`: later writes
  /// of a home go to another extent. No transfer may be running. Returns when it is on the disks.
  /// Throws Error(io).
  std::vector<KeptExtent> keep(std::uint64_t checkpoint, std::span<const plan::BufferId> homes);
  /// The checkpoint needs its extents no more. Does nothing for an unknown one.
  void release(std::uint64_t checkpoint);
  /// Checkpoints that keep extents.
  [[nodiscard]] std::vector<std::uint64_t> kept() const;
  /// Says what existing swap files hold: these homes, and what checkpoints keep. Before any
  /// transfer.
  void restore(std::span<const std::pair<plan::BufferId, KeptExtent>> homes,
               const KeptExtents& kept);

  [[nodiscard]] Bytes allocated(Tier tier) const;
  /// nullptr without NVMe buffers.
  [[nodiscard]] const SwapSpace* swap_space() const { return swap_.get(); }

 private:
  struct Allocation {
    HostBytes host;
    DeviceBytes device;
    std::optional<std::size_t> home;  ///< NVMe buffers only: their number
    std::uint64_t version = 0;        ///< NVMe buffers: number of writebacks
  };

  device::Device& device_;
  memory::HostPool pool_;
  std::unique_ptr<device::Pin> pin_;  ///< of the whole pool; destroyed before it
  std::vector<Allocation> allocations_;
  std::unique_ptr<Slots> slots_;     ///< of the homes
  std::unique_ptr<SwapSpace> swap_;  ///< refers to the pool; destroyed first
};

}  // namespace ballast::state
