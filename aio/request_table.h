#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "ballast/aio/queue.h"

#include "aio/transport.h"

namespace ballast::aio {

using Clock = std::chrono::steady_clock;

/// A request in progress. Until done it belongs to the owner thread, except for the fields that
/// RequestTable guards.
struct ActiveRequest {
  std::uint64_t id = 0;
  Request request;
  Completion completion;
  Clock::time_point submitted;
  Bytes cut = 0;           ///< bytes handed out as blocks
  unsigned in_flight = 0;  ///< blocks
  bool lifted = false;     ///< a read ahead that now has a waiter
  /// Ended by the timeout while some of its blocks are still at the device.
  bool abandoned = false;

  // Guarded by RequestTable.
  bool done = false;     ///< from then on the completion belongs to the waiter
  bool claimed = false;  ///< has a waiter
  bool free = true;      ///< no block of it is in flight
};

/// "read FILE offset=.. length=.."
std::string describe(Direction direction, const std::string& file, Bytes offset, Bytes length);

/// Requests and results shared by the callers and the owner thread.
class RequestTable {
 public:
  // Callers.
  std::vector<Ticket> submit(std::span<Request> requests);
  Completion wait(Ticket ticket);
  void cancel();
  [[nodiscard]] QueueCounters counters() const;
  /// Makes the owner thread finish all requests and end. Returns when it has ended: false if it
  /// left blocks that the device does not answer.
  bool stop();

  // Calls of the owner thread.
  /// The transport to wake; null before it is made and after it is destroyed.
  void set_transport(Transport* transport);
  /// Changes since the last take().
  struct Orders {
    std::vector<ActiveRequest*> arrivals;
    std::vector<ActiveRequest*> lifted;  ///< reads ahead that now have a waiter
    bool cancelled = false;
    bool stopping = false;
  };
  Orders take();
  /// Whether the owner thread may sleep. It may not if it has room for new requests. Until the next
  /// take(), a submit wakes it if it has room.
  bool may_sleep(bool has_room);
  /// Hands over ended transfers (their memory is returned, or they are abandoned) and adds to the
  /// totals.
  void end(std::span<ActiveRequest* const> transfers, const QueueCounters& progress);
  /// Frees an abandoned transfer after its last block has returned.
  void forget(ActiveRequest& transfer);
  enum class Ending { running, complete, parked };
  void finish(Ending ending);

 private:
  using Owned = std::unique_ptr<ActiveRequest>;
  void wake();

  mutable std::mutex mutex_;
  std::condition_variable done_;
  Transport* transport_ = nullptr;
  std::unordered_map<std::uint64_t, Owned> transfers_;
  /// Transfers already waited for that still have blocks at the device.
  std::unordered_map<std::uint64_t, Owned> orphans_;
  std::vector<ActiveRequest*> arrivals_;
  std::vector<std::uint64_t> lifted_;
  std::uint64_t last_id_ = 0;
  QueueCounters counters_;
  bool owner_wants_wake_ = false;
  bool cancelled_ = false;
  bool stopping_ = false;
  Ending ending_ = Ending::running;
};

}  // namespace ballast::aio
