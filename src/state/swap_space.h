#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/view.h"
#include "ballast/state/store.h"
#include "ballast/state/stripe.h"
#include "ballast/state/swap_plan.h"

namespace ballast::state {

/// The file of one path and what carries transfers to and from it.
struct SwapDevice {
  aio::File file;
  std::unique_ptr<aio::Queue> queue;  ///< declared behind the file, which must outlive it
};

/// Extents on fast disks: one preallocated, nameless file and one queue per path. Data is written
/// in chunks; the XXH3 checksum and the version of every chunk stay in memory and are compared at
/// each read, so a lost, torn, stale or flipped write cannot pass. Several transfers may be under
/// way at a time, also of different threads, each of another extent.
///
/// Blocks of the files are allocated when they are created and taken into use by the first write of
/// each extent, which is always the whole of it: later writes only overwrite, so that they cannot
/// run out of space and the file system has nothing to record for them.
class SwapSpace {
 public:
  /// Creates the files. `staging` is the memory that most transfers will use; it is registered with
  /// the queues and must outlive this. Throws Error(io): see aio::File::create_anonymous and
  /// aio::make_queue.
  SwapSpace(const SwapPlan& plan, std::span<const HostBytes> staging);
  /// The same over files and queues of the caller's, a device per path (tests put faulty ones
  /// here).
  SwapSpace(Stripe stripe, std::vector<std::unique_ptr<SwapDevice>> devices);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  /// Starts to write all of an extent (page-aligned `data` of its size) as `version`: computes the
  /// checksum of one segment after the other and submits each at once. `data` must stay as it is
  /// until the transfer has ended. Transfer::finish() throws Error(io) for a failed request;
  /// reading the extent fails from then on. Throws Error(state) for another size.
  [[nodiscard]] std::unique_ptr<Transfer> write(std::size_t extent, HostBytes data,
                                                std::uint64_t version);

  /// Starts to read what was written last; no write of the extent may be under way. `ahead`: nobody
  /// waits for it yet (aio::Request). Transfer::finish() throws Error(io) for a failed request and
  /// Error(state) when a checksum or the version is not what was written; `data` is of no use then.
  [[nodiscard]] std::unique_ptr<Transfer> read(std::size_t extent, HostBytes data,
                                               std::uint64_t version, bool ahead = false);

  [[nodiscard]] const Stripe& stripe() const { return stripe_; }
  /// Per path, since the start.
  [[nodiscard]] std::vector<aio::QueueCounters> counters() const;
  /// "io_uring" or "threads", or "io_uring and threads".
  [[nodiscard]] const std::string& backend() const { return backend_; }

 private:
  struct Seal {
    std::uint64_t checksum = 0;
    std::uint64_t version = 0;
    bool written = false;
  };
  class ExtentTransfer;
  class Reading;
  class Writing;

  [[nodiscard]] std::span<Seal> seals(std::size_t extent, const Segment& segment);

  Stripe stripe_;
  std::vector<std::unique_ptr<SwapDevice>> devices_;  ///< by path; addresses are registered
  std::string backend_;
  std::vector<Seal> seals_;  ///< by chunk number
};

}  // namespace ballast::state
