#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ballast/schedule/plan.h"
#include "ballast/schedule/timeline.h"

namespace ballast::schedule {

/// Seconds and bytes per lane since the executor was made. Busy: an operation was running. Stalled:
/// the next operation waited for its inputs. Enqueueing: what a queued lane's thread needed to hand
/// operations to the device or the disks, most of it under the operation before.
struct LaneTotals {
  std::array<double, kLaneCount> busy_seconds{};
  std::array<double, kLaneCount> stalled_seconds{};
  std::array<double, kLaneCount> enqueueing_seconds{};
  std::array<Bytes, kLaneCount> bytes{};
};

/// Does something about one operation of the plan that was submitted as number `submission`; throws
/// Error on failure. Called from several threads, for one operation per lane at a time.
using Handler = std::function<void(const Operation& operation, std::uint64_t submission)>;

/// Most operations of a lane that are enqueued and not over: one runs, the next is there when it
/// ends. More would have to be waited for after an interrupt.
inline constexpr std::size_t kMostEnqueued = 2;

struct ExecutorOptions {
  /// Where it is set, the handler of the executor only enqueues operations of queued lanes
  /// (is_queued) on their stream, or submits their requests to the disks; this returns when one of
  /// them is over, called in the order in which they were started. So device and disks go from one
  /// operation to the next without the host.
  Handler finish = nullptr;
  /// Runs every operation in plan order on the caller's thread. Same results, for debugging.
  bool serial = false;
  /// Sleeps a seeded random time (up to 300 microseconds) before each operation, to shake out
  /// missing edges.
  std::optional<std::uint64_t> delay_seed;
  /// Called with every finished operation, one call at a time. Must be quick.
  std::function<void(const Span&)> observer;
  /// When set and true, no further operation starts and waits throw Error(interrupted).
  const std::atomic<bool>* interrupted = nullptr;
};

/// Runs plans: one thread per lane, a second one for each that is queued, completion per operation,
/// no barrier between steps. A plan may be submitted while the one before still runs; its
/// operations then wait for just those they follow.
class Executor {
 public:
  /// Names an operation in error messages.
  using Namer = std::function<std::string(const Operation&)>;

  /// `handler`: performs one operation and returns when it is over (but see
  /// ExecutorOptions::finish).
  Executor(Handler handler, Namer namer, const ExecutorOptions& options);
  /// Abandons what has not started and waits for what has.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Queues `plan` (which must outlive the executor) as submission number `number`, above all
  /// before. Any plan of the schedule may follow any other: what orders their operations is seam().
  /// Waits until the last submission but one is finished. Throws what an operation threw, with the
  /// operation named; the executor runs nothing more after that.
  void submit(const Plan& plan, std::uint64_t number);

  /// Blocks until operation `id` of the last submission is finished. Throws like submit().
  void wait(OpId id);

  /// Blocks until everything submitted is finished. Throws like submit().
  void drain();

  [[nodiscard]] LaneTotals totals() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ballast::schedule
