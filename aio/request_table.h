#pragma once

#include <condition_variable>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "aio/transfer.h"
#include "aio/transport.h"

namespace ballast::aio {

/// Where the threads that submit and wait meet the owner thread: what has arrived, what is done.
class RequestTable {
 public:
  // Callers.
  std::vector<Ticket> submit(std::span<Request> requests);
  Completion wait(Ticket ticket);
  void cancel();
  [[nodiscard]] QueueCounters counters() const;
  /// Asks the owner thread to carry out the rest and end; returns when it has. False when it had to
  /// leave blocks that the device does not answer.
  bool stop();

  // The owner thread.
  /// Who is woken; null before the transport is made and after it is gone.
  void set_transport(Transport* transport);
  /// What changed since the last call.
  struct Orders {
    std::vector<Transfer*> arrivals;
    std::vector<Transfer*> lifted;  ///< reads ahead that somebody waits for now
    bool cancelled = false;
    bool stopping = false;
  };
  Orders take();
  /// Whether the owner thread may sleep: not when something has arrived that it has room for. From
  /// here until the next take() a submit wakes it, if it has room.
  bool may_sleep(bool has_room);
  /// Hands over ended transfers (their memory is back, or they are abandoned) and adds to the
  /// totals.
  void end(std::span<Transfer* const> transfers, const QueueCounters& progress);
  /// The last block of an abandoned transfer came back.
  void forget(Transfer& transfer);
  enum class Ending { running, complete, parked };
  void finish(Ending ending);

 private:
  using Owned = std::unique_ptr<Transfer>;
  void wake();

  mutable std::mutex mutex_;
  std::condition_variable done_;
  Transport* transport_ = nullptr;
  std::unordered_map<std::uint64_t, Owned> transfers_;
  /// Waited for, but a block of theirs is still at the device.
  std::unordered_map<std::uint64_t, Owned> orphans_;
  std::vector<Transfer*> arrivals_;
  std::vector<std::uint64_t> lifted_;
  std::uint64_t last_id_ = 0;
  QueueCounters counters_;
  bool owner_wants_wake_ = false;
  bool cancelled_ = false;
  bool stopping_ = false;
  Ending ending_ = Ending::running;
};

}  // namespace ballast::aio
