#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ballast/plan/lane_times.h"
#include "ballast/plan/plan.h"

namespace ballast::plan {

/// Seconds and bytes per lane since the executor was made. By kind of lane: for lanes that each
/// device has, seconds are means over the devices, and bytes are sums. Busy: an operation was
/// running. Stalled: the next operation waited for its inputs. Enqueueing: the thread of a queued
/// lane handed operations to the device or the disks, mostly while the previous operation was
/// running.
struct LaneTotals {
  std::array<double, kLaneCount> busy_seconds{};
  std::array<double, kLaneCount> stalled_seconds{};
  std::array<double, kLaneCount> enqueueing_seconds{};
  std::array<Bytes, kLaneCount> bytes{};
  LaneSeconds busy_by_device{};  ///< each lane of each device
  LaneSeconds stalled_by_device{};
};

/// Starts or finishes one operation of submission number `submission`; throws Error on failure.
/// Called from several threads, for one operation per lane at a time.
using Handler = std::function<void(const Operation& operation, std::uint64_t submission)>;

/// Maximum number of unfinished operations in a queued lane: one runs, and the next can start when
/// it ends. More would delay the end of the run after an interrupt, and share a disk between more
/// requests.
inline constexpr std::size_t kMaxEnqueued = 2;
/// The maximum for a stream whose operations may take less time than the host needs to enqueue one.
inline constexpr std::size_t kMaxOnFastStream = 8;

struct ExecutorOptions {
  /// If set, the executor's handler only enqueues operations of queued lanes (is_queued) on their
  /// stream or submits their disk requests. `finish` returns when one of them has finished; it is
  /// called in start order. Device and disks then continue with the next operation without the
  /// host.
  Handler finish = nullptr;
  /// If set, collectives (is_collective_lane) are enqueued on a stream, too: one for both lanes of
  /// a device. A collective, or an operation that needs one, starts when the operations that it
  /// needs are enqueued (stream_can_wait). For each of these the executor first calls `follow`,
  /// which makes the stream of `next` wait for the end of `before`, of submission number
  /// `submission`, on the device. `before` may have finished meanwhile. Called from the thread that
  /// starts `next`.
  std::function<void(const Operation& next, const Operation& before, std::uint64_t submission)>
      follow = nullptr;
  /// Maximum number of unfinished operations in a lane whose operations are on a stream.
  std::size_t max_on_stream = kMaxEnqueued;
  /// If set, the operations that it selects start one at a time on each device, in an order that
  /// depends on the submitted plans alone. An operation's turn ends when it is enqueued, or, in a
  /// lane that is not queued, when it has finished. An operation of another lane follows the
  /// collectives with earlier turns. For collectives, which all ranks must start in the same order.
  std::function<bool(const Operation& operation)> takes_turn = nullptr;
  std::uint32_t devices = 1;  ///< Schedule::devices of the plans
  /// Runs every operation in plan order on the caller's thread, with the same results, for
  /// debugging.
  bool serial = false;
  /// Sleeps a seeded random time (up to 300 microseconds) before each operation, to expose missing
  /// edges.
  std::optional<std::uint64_t> delay_seed;
  /// Called with every finished operation, one call at a time. Must be fast.
  std::function<void(const Span&)> observer;
  /// When set and true, no further operation starts and waits throw Error(interrupted).
  const std::atomic<bool>* interrupted = nullptr;
};

/// Runs plans with one thread per lane of each device, two per queued lane, and no barrier between
/// steps. A plan may be submitted while the previous one still runs; each operation waits only for
/// its inputs.
class Executor {
 public:
  /// `handler`: performs one operation and returns when it has finished, unless
  /// ExecutorOptions::finish is set. `names`: for error messages.
  Executor(Handler handler, Names names, const ExecutorOptions& options);
  /// Abandons operations that have not started and waits for those that have.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Queues `plan` (which must outlive the executor) as submission number `number`; numbers
  /// increase. Any plan of the schedule may follow any other: seam() orders their operations. Waits
  /// until the second-last submission has finished. Rethrows the Error of an operation with its
  /// name; the executor runs nothing after that.
  void submit(const Plan& plan, std::uint64_t number);

  /// Blocks until operation `id` of the last submission is finished. Throws like submit().
  void wait(OpId id);

  /// Blocks until everything submitted is finished. Throws like submit().
  void drain();

  /// Returns times and bytes so far. Times include the running and waiting operations up to now;
  /// their bytes count when they end.
  [[nodiscard]] LaneTotals totals() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ballast::plan
