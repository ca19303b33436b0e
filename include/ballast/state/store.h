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

/// A transfer between host memory and NVMe that is under way. The memory must not be used otherwise
/// until it has ended. The destructor waits for its requests, whatever came of them.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Blocks until all requests have ended, but for those that the device has not answered for
  /// abandon_seconds. To be called once. Throws Error(io) or Error(state), one line that names
  /// stage, file, offset and length.
  virtual void finish() = 0;
};

/// Sizes of a schedule's NVMe buffers, in their order: what plan_swap wants.
std::vector<Bytes> swap_extents(const schedule::Schedule& schedule);

/// Gives every buffer of a schedule its place (device arena, host pool, swap space) and moves whole
/// buffers between host memory and the swap space. All of its host memory is pinned. The device
/// must outlive it.
class Store {
 public:
  /// Allocates everything. `swap` is laid out for swap_extents(schedule); none if that is empty.
  /// Throws Error of the tier that cannot serve.
  Store(const schedule::Schedule& schedule, device::Device& device,
        const std::optional<SwapPlan>& swap);
  ~Store();

  /// The first `bytes` of a buffer on that tier. Throws Error(state) for another tier's buffer.
  [[nodiscard]] HostBytes host(schedule::BufferId id, Bytes bytes) const;
  [[nodiscard]] DeviceBytes device(schedule::BufferId id, Bytes bytes) const;

  /// Starts to move all of an NVMe home to `data`, checked against the version written last.
  /// `ahead`: nobody waits for it yet. The home's last writeback must have ended.
  [[nodiscard]] std::unique_ptr<Transfer> fetch(schedule::BufferId home, HostBytes data,
                                                bool ahead = false);
  /// Starts to move `data` to an NVMe home, all of it, as the next version.
  [[nodiscard]] std::unique_ptr<Transfer> writeback(schedule::BufferId home, HostBytes data);

  [[nodiscard]] Bytes allocated(Tier tier) const;
  /// Bytes written to each NVMe path since the start, initial fill included.
  [[nodiscard]] std::vector<Bytes> nvme_bytes_written() const;
  /// Names of the I/O backends in use, "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Allocation {
    HostBytes host;
    DeviceBytes device;
    std::optional<std::size_t> extent;  ///< of an NVMe buffer
    std::uint64_t version = 0;          ///< of an NVMe buffer: number of writebacks
  };

  device::Device& device_;
  memory::HostPool pool_;
  std::unique_ptr<device::Pin> pin_;  ///< of the whole pool, so it ends before that
  std::vector<Allocation> allocations_;
  std::unique_ptr<SwapSpace> swap_;  ///< knows places in the pool, so it ends first
};

}  // namespace ballast::state
