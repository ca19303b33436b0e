#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/device/device.h"
#include "ballast/memory/host_pool.h"
#include "ballast/schedule/plan.h"
#include "ballast/state/swap_file.h"

namespace ballast::state {

/// Gives every buffer of a schedule its place (device arena, host pool, swap file extent) and moves
/// whole buffers between host memory and the swap file. The device must outlive it.
class Store {
 public:
  /// Allocates everything. `swap_directory` is used only if a buffer is on NVMe. Throws Error of
  /// the tier that cannot serve.
  Store(const schedule::Schedule& schedule, device::Device& device,
        const std::filesystem::path& swap_directory, const aio::QueueOptions& io);
  ~Store();

  /// The first `bytes` of a buffer on that tier. Throws Error(state) for another tier's buffer.
  [[nodiscard]] HostBytes host(schedule::BufferId id, Bytes bytes) const;
  [[nodiscard]] DeviceBytes device(schedule::BufferId id, Bytes bytes) const;

  /// NVMe home to staging, `data.size()` bytes, checked against the version written last.
  void fetch(schedule::BufferId home, HostBytes data);
  /// Staging to NVMe home as the next version.
  void writeback(schedule::BufferId home, HostBytes data);

  [[nodiscard]] Bytes allocated(Tier tier) const;
  /// Bytes written to NVMe since the start, initial fill included.
  [[nodiscard]] Bytes nvme_bytes_written() const;
  /// Name of the I/O backend in use, "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Place {
    HostBytes host;
    DeviceBytes device;
    Extent extent;
    std::uint64_t version = 0;  ///< of an NVMe buffer: number of write-backs
  };

  device::Device& device_;
  memory::HostPool pool_;
  std::unique_ptr<SwapFile> swap_;
  std::vector<Place> places_;
};

}  // namespace ballast::state
