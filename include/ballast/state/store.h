#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "ballast/device/device.h"
#include "ballast/memory/host_pool.h"
#include "ballast/schedule/plan.h"
#include "ballast/state/swap_plan.h"

namespace ballast::state {

class SwapSpace;

/// Instead of the first byte of zeros: the caller knows of none.
inline constexpr Bytes kNoZeros = ~Bytes{0};

/// A running transfer between host memory and NVMe. Its memory must not be used until it has ended.
/// The destructor waits for all requests and ignores their errors.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Blocks until all requests have ended; gives up those without an answer for abandon_seconds.
  /// Call it once. Throws Error(io) or Error(state) naming stage, file, offset and length.
  virtual void finish() = 0;
};

/// Sizes of a schedule's NVMe buffers in order, for plan_swap().
std::vector<Bytes> swap_extents(const schedule::Schedule& schedule);

/// Allocates every buffer of a schedule (device, pinned host pool, swap space) and moves whole
/// buffers between host memory and the swap space. The device must outlive it.
class Store {
 public:
  /// `swap` is laid out for swap_extents(schedule); not needed if that is empty. Throws the Error
  /// of the tier that cannot allocate.
  Store(const schedule::Schedule& schedule, device::Device& device,
        const std::optional<SwapPlan>& swap);
  ~Store();

  /// The first `bytes` of a buffer. Throws Error(state) for a buffer of another tier.
  [[nodiscard]] HostBytes host(schedule::BufferId id, Bytes bytes) const;
  [[nodiscard]] DeviceBytes device(schedule::BufferId id, Bytes bytes) const;

  /// Starts to read a whole NVMe home into `data`, verified against the last written version.
  /// `ahead`: no operation waits for it yet. The home's last writeback must have ended.
  [[nodiscard]] std::unique_ptr<Transfer> fetch(schedule::BufferId home, HostBytes data,
                                                bool ahead = false);
  /// Starts to write `data` to a whole NVMe home as the next version. From byte `zeros_from` on all
  /// are zero, as far as the caller knows: they need not be written to a new home.
  [[nodiscard]] std::unique_ptr<Transfer> writeback(schedule::BufferId home, HostBytes data,
                                                    Bytes zeros_from = kNoZeros);

  /// Exchanges the places of two NVMe homes of equal size, each with its content and version. No
  /// transfer of either may be running.
  void exchange(schedule::BufferId home, schedule::BufferId other);

  [[nodiscard]] Bytes allocated(Tier tier) const;
  /// Bytes written to each NVMe path since the start, initial fill included.
  [[nodiscard]] std::vector<Bytes> nvme_bytes_written() const;
  /// Names of the I/O backends in use, "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Allocation {
    HostBytes host;
    DeviceBytes device;
    std::optional<std::size_t> extent;  ///< NVMe buffers only
    std::uint64_t version = 0;          ///< NVMe buffers: number of writebacks
  };

  device::Device& device_;
  memory::HostPool pool_;
  std::unique_ptr<device::Pin> pin_;  ///< of the whole pool; destroyed before it
  std::vector<Allocation> allocations_;
  std::unique_ptr<SwapSpace> swap_;  ///< refers to the pool; destroyed first
};

}  // namespace ballast::state
