#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "ballast/core/mapping.h"
#include "ballast/core/view.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/state/swap_plan.h"

#include "src/offload/layout.h"
#include "src/state/swap_space.h"

namespace ballast::offload {

/// Where sub-groups live.
struct Place {
  std::optional<state::SwapOptions> nvme;  ///< unset: all in memory
  /// With nvme: memory for staging and for sub-groups that stay in memory, the first ones. Unset:
  /// staging alone.
  std::optional<Bytes> host_bytes;
};

/// The memory of all sub-groups, in host memory or on NVMe. Those on NVMe pass through a few
/// staging buffers: while one is updated, the next ones are read and the last ones written. Not
/// thread-safe.
class Homes {
 public:
  /// Throws Error(memory) and those of state::plan_swap(); Error(config) if host_bytes cannot hold
  /// the staging buffers.
  Homes(const Layout& layout, const cpu_adam::Updater& updater, const Place& place);
  ~Homes();
  Homes(const Homes&) = delete;
  Homes& operator=(const Homes&) = delete;

  /// The states of a sub-group, zero at first. Valid until release(). `ahead`: starts to read the
  /// next ones too. Throws Error(io) and Error(state) like state::Transfer::finish().
  HostBytes acquire(std::size_t group, bool ahead);
  /// Without a further acquire(); `changed`: to be written back.
  void release(std::size_t group, bool changed);
  /// Starts to read the sub-groups with which the next pass begins.
  void read_first();
  /// Returns when all is written. Throws like acquire().
  void finish_writes();

  /// Bytes of memory, staging included.
  [[nodiscard]] Bytes host_bytes() const { return memory_.bytes().size(); }
  /// Bytes of NVMe.
  [[nodiscard]] Bytes nvme_bytes() const;
  /// "io_uring" or "threads"; "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Home {
    HostBytes memory;        ///< of a resident sub-group
    std::size_t extent = 0;  ///< of one on NVMe
    std::uint64_t version = 0;
  };
  struct Staging {
    HostBytes memory;
    std::optional<std::size_t> group;
    std::unique_ptr<state::Transfer> reading;
    std::unique_ptr<state::Transfer> writing;
    bool in_use = false;
  };

  void place_groups(const Place& place, Bytes staging, std::vector<Bytes>& extents);
  [[nodiscard]] bool resident(std::size_t group) const { return group < resident_; }
  [[nodiscard]] Staging* find(std::size_t group);
  /// The next staging buffer in turn, without a transfer.
  Staging& take_staging();
  Staging& start_read(std::size_t group, bool ahead);
  void read_after(std::size_t group, std::size_t count);

  const Layout& layout_;
  Mapping memory_;
  std::vector<Home> homes_;
  std::size_t resident_ = 0;  ///< the first ones
  std::vector<Staging> staging_;
  std::size_t turn_ = 0;
  std::unique_ptr<state::SwapSpace> swap_;  ///< destroyed first: its requests use the memory
};

}  // namespace ballast::offload
