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

/// Bytes of a block's state buffer: in bf16 training the 16-bit remainders, in both trainings the
/// first and the second moments, one after the other, each `elements` long.
struct StateLayout {
  bool split = true;  ///< weights are bf16 + remainder; false: plain fp32 weights
  Elems elements = 0;

  [[nodiscard]] Bytes weight_bytes() const { return elements * (split ? 2 : 4); }
  [[nodiscard]] Bytes remainder_bytes() const { return split ? elements * 2 : 0; }
  [[nodiscard]] Bytes moment_bytes() const { return elements * 4; }
  [[nodiscard]] Bytes state_bytes() const { return remainder_bytes() + 2 * moment_bytes(); }
  [[nodiscard]] Bytes first_moment_offset() const { return remainder_bytes(); }
  [[nodiscard]] Bytes second_moment_offset() const { return remainder_bytes() + moment_bytes(); }
};

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
