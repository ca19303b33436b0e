#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/state/swap_plan.h"
#include "ballast/state/swap_space.h"

#include "src/offload/layout.h"

namespace ballast::offload {

/// The place of sub-groups.
struct StatePlace {
  std::optional<state::SwapOptions> nvme;  ///< unset: everything in memory
  /// With nvme: memory for staging, and for the first sub-groups, which stay in memory. Unset:
  /// memory only for staging.
  std::optional<Bytes> host_bytes;
};

/// When a released sub-group is written back, if it has changed: now, or when its buffer gets
/// another sub-group or finish_writes() is called.
enum class WriteBack : std::uint8_t { none, now, later };

/// The memory of all sub-groups, in host memory or on NVMe. Sub-groups on NVMe pass through a few
/// staging buffers: while one is updated, the next are read and the last are written. Not
/// thread-safe.
class StateHomes {
 public:
  /// Throws Error(memory) and those of state::plan_swap(); Error(config) if host_bytes cannot hold
  /// the staging buffers. `layout` and `updater` must outlive this.
  StateHomes(const OffloadLayout& layout, const cpu_adam::Updater& updater, StatePlace place);
  ~StateHomes();
  StateHomes(const StateHomes&) = delete;
  StateHomes& operator=(const StateHomes&) = delete;

  /// Makes room for the additional sub-groups of `grown`, which the caller then makes the layout.
  /// Nothing changes if it throws; throws like the constructor.
  void grow(const OffloadLayout& grown);

  /// Returns the states of a sub-group, zero at first. Valid until release(). `ahead`: also
  /// prefetches the next ones. Throws Error(io) and Error(state) like
  /// state::SwapTransfer::finish().
  HostBytes acquire(std::size_t group, bool ahead);
  /// Releases a sub-group before the next acquire().
  void release(std::size_t group, WriteBack write);
  /// Starts to read the first sub-groups of the next pass.
  void read_first();
  /// Returns when everything is written. Throws like acquire().
  void finish_writes();

  /// Bytes of memory, including staging.
  [[nodiscard]] Bytes host_bytes() const;
  /// Bytes on NVMe.
  [[nodiscard]] Bytes nvme_bytes() const;
  /// Returns "io_uring" or "threads"; "" without NVMe.
  [[nodiscard]] std::string_view io_backend() const;

 private:
  struct Home {
    HostBytes memory;                   ///< if resident
    state::SwapSpace* space = nullptr;  ///< if on NVMe
    std::size_t extent = 0;             ///< extent in its space
    std::uint64_t version = 0;
  };
  struct Staging {
    HostBytes memory;
    std::optional<std::size_t> group;
    std::unique_ptr<state::SwapTransfer> reading;
    std::unique_ptr<state::SwapTransfer> writing;
    bool in_use = false;
    bool changed = false;  ///< must be written later
  };

  /// Places of new sub-groups, and the size of the staging buffers that all then need.
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
  /// Returns the next staging buffer in turn, without a transfer.
  Staging& take_staging();
  Staging& start_read(std::size_t group, bool ahead);
  void start_write(Staging& staging);
  /// Starts the writes of changed sub-groups that are not in use, except one.
  void start_writes(std::optional<std::size_t> except);
  /// Starts to read the next sub-groups on NVMe, beginning with the one at `position` in swapped_.
  void read_from(std::size_t position);
  void finish_transfers();

  const OffloadLayout& layout_;
  const cpu_adam::Updater& updater_;
  StatePlace place_;
  std::vector<Mapping> memory_;  ///< memory of resident sub-groups
  Bytes resident_bytes_ = 0;
  std::vector<Home> homes_;
  std::vector<std::size_t> swapped_;  ///< sub-groups on NVMe
  /// The last mapping has the staging buffers; earlier ones are registered with older spaces.
  std::vector<Mapping> staging_memory_;
  Bytes largest_ = 0;  ///< size of a staging buffer
  std::vector<Staging> staging_;
  std::size_t turn_ = 0;
  /// Destroyed first, because their requests use the memory.
  std::vector<std::unique_ptr<state::SwapSpace>> spaces_;
};

}  // namespace ballast::offload
