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
#include "ballast/state/swap_space.h"

#include "src/offload/layout.h"

namespace ballast::offload {

/// Where sub-groups live.
struct StatePlace {
  std::optional<state::SwapOptions> nvme;  ///< unset: all in memory
  /// With nvme: memory for staging and for sub-groups that stay in memory, the first ones. Unset:
  /// staging alone.
  std::optional<Bytes> host_bytes;
};

/// The memory of all sub-groups, in host memory or on NVMe. Those on NVMe pass through a few
/// staging buffers: while one is updated, the next ones are read and the last ones written. Not
/// thread-safe.
class StateHomes {
 public:
  /// Throws Error(memory) and those of state::plan_swap(); Error(config) if host_bytes cannot hold
  /// the staging buffers.
  /// `layout`, `updater`: used as long as this exists.
  StateHomes(const OffloadLayout& layout, const cpu_adam::Updater& updater, StatePlace place);
  ~StateHomes();
  StateHomes(const StateHomes&) = delete;
  StateHomes& operator=(const StateHomes&) = delete;

  /// Makes room for the sub-groups that `grown` has more than the layout, which becomes `grown` by
  /// the caller afterwards. Nothing changes if it throws; throws like the constructor.
  void grow(const OffloadLayout& grown);

  /// The states of a sub-group, zero at first. Valid until release(). `ahead`: starts to read the
  /// next ones too. Throws Error(io) and Error(state) like state::SwapTransfer::finish().
  HostBytes acquire(std::size_t group, bool ahead);
  /// Without a further acquire(); `changed`: to be written back.
  void release(std::size_t group, bool changed);
  /// Starts to read the sub-groups with which the next pass begins.
  void read_first();
  /// Returns when all is written. Throws like acquire().
  void finish_writes();

  /// Bytes of memory, staging included.
  [[nodiscard]] Bytes host_bytes() const;
  /// Bytes of NVMe.
  [[nodiscard]] Bytes nvme_bytes() const;
  /// "io_uring" or "threads"; "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Home {
    HostBytes memory;                   ///< of a resident sub-group
    state::SwapSpace* space = nullptr;  ///< of one on NVMe
    std::size_t extent = 0;             ///< in its space
    std::uint64_t version = 0;
  };
  struct Staging {
    HostBytes memory;
    std::optional<std::size_t> group;
    std::unique_ptr<state::SwapTransfer> reading;
    std::unique_ptr<state::SwapTransfer> writing;
    bool in_use = false;
  };

  /// Where new sub-groups go, and the size of the staging buffers that all then need.
  struct Growth {
    std::vector<bool> resident;
    Bytes resident_bytes = 0;
    std::vector<Bytes> extents;
    std::size_t buffers = 0;
    Bytes largest = 0;
  };

  [[nodiscard]] Growth plan_growth(const OffloadLayout& grown) const;
  [[nodiscard]] bool needs_other_staging(const Growth& growth) const;
  [[nodiscard]] bool resident(std::size_t group) const { return homes_[group].space == nullptr; }
  [[nodiscard]] Staging* find(std::size_t group);
  /// The next staging buffer in turn, without a transfer.
  Staging& take_staging();
  Staging& start_read(std::size_t group, bool ahead);
  /// Starts to read the next sub-groups on NVMe from the one at `position` in swapped_ on.
  void read_from(std::size_t position);
  void finish_transfers();

  const OffloadLayout& layout_;
  const cpu_adam::Updater& updater_;
  StatePlace place_;
  std::vector<Mapping> memory_;  ///< of resident sub-groups
  Bytes resident_bytes_ = 0;
  std::vector<Home> homes_;
  std::vector<std::size_t> swapped_;  ///< the sub-groups on NVMe
  /// The last one holds the staging buffers; those before it are registered with older spaces.
  std::vector<Mapping> staging_memory_;
  Bytes largest_ = 0;  ///< size of a staging buffer
  std::vector<Staging> staging_;
  std::size_t turn_ = 0;
  /// Destroyed first: their requests use the memory.
  std::vector<std::unique_ptr<state::SwapSpace>> spaces_;
};

}  // namespace ballast::offload
