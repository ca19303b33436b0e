#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/core/memory.h"

namespace ballast::aio {

enum class Direction : std::uint8_t { read, write };

/// One transfer between `memory` and [offset, offset + memory.size()) of `file`. Any length; the
/// queue splits it into blocks. `file` must outlive the completion. The caller owns `memory`: it
/// must stay valid, and must not be used otherwise, until the request has ended. After ETIMEDOUT
/// the device may still use it, until `returned` is called.
struct Request {
  Direction direction = Direction::read;
  const File* file = nullptr;
  Bytes offset = 0;
  HostBytes memory;
  /// Whether this is a read ahead, which no one waits for yet. It is started after reads with a
  /// waiter and before writes. wait() raises its priority.
  bool ahead = false;
  /// Called once on the queue's own thread, when no block of the request uses `memory` any more and
  /// before wait() returns. After ETIMEDOUT it is called later, or never if blocks do not come
  /// back. May submit, must not wait. Its captures live until then, so a request can own its
  /// memory.
  std::function<void()> returned = nullptr;
};

/// Identifies a submitted request; valid for one wait().
struct Ticket {
  std::uint64_t id = 0;
};

/// Result of a request. Success means `error_number == 0` and `transferred` equal to the requested
/// length. Short transfers have been continued and EINTR and EAGAIN retried, so any error is final:
/// EIO for a read past the end of the file, ECANCELED after cancel(), ETIMEDOUT without an answer
/// from the device.
struct [[nodiscard]] Completion {
  Direction direction = Direction::read;
  int error_number = 0;
  bool end_of_file = false;  ///< EIO because the file ends inside the range
  Bytes transferred = 0;
  Bytes offset = 0;
  Bytes length = 0;
  double seconds = 0.0;  ///< from submit to the end of the last block
  std::string file;

  [[nodiscard]] bool ok() const { return error_number == 0 && transferred == length; }
  /// Throws Error(io) "<stage>: write FILE offset=.. length=..: <cause>" unless ok().
  void check(std::string_view stage) const;
};

/// Totals since the queue was made.
struct QueueCounters {
  Bytes bytes_read = 0;
  Bytes bytes_written = 0;
  std::uint64_t blocks = 0;
  std::uint64_t continued = 0;  ///< short transfers that were continued
  std::uint64_t batches = 0;    ///< submissions to the backend, of one or more blocks each
};

/// Asynchronous transfers to and from the files of one device. Thread-safe: several lanes may share
/// one queue. Queued requests start in this order: reads with a waiter, reads ahead, writes; equal
/// ones in order of submission. The destructor finishes all requests; call cancel() first for a
/// quick end.
class Queue {
 public:
  virtual ~Queue() = default;
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// Takes the request; never blocks on I/O. Throws Error(state) when offset, length or address
  /// break file.alignment(), or the range lies outside the file.
  [[nodiscard]] virtual Ticket submit(Request request) = 0;
  /// Takes all requests or, when it throws, none. Cheaper than single submits. Tickets are in the
  /// same order.
  [[nodiscard]] virtual std::vector<Ticket> submit(std::span<Request> requests) = 0;

  /// Blocks until the request is finished. Each ticket is waited for once.
  virtual Completion wait(Ticket ticket) = 0;

  /// Ends all present and later requests with ECANCELED; blocks already at the device are awaited.
  /// For shutdown; returns at once.
  virtual void cancel() = 0;

  /// "io_uring", "threads" or "null".
  [[nodiscard]] virtual std::string_view backend() const = 0;
  [[nodiscard]] virtual QueueCounters counters() const = 0;
};

/// Settings of a queue.
struct QueueOptions {
  std::string backend = "auto";       ///< auto, io_uring, threads or null
  Bytes block_bytes = 1 * kMiB;       ///< largest single transfer
  unsigned depth = 32;                ///< maximum number of blocks in flight
  Bytes in_flight_bytes = 64 * kMiB;  ///< maximum number of bytes in flight (but always one block)
  double stall_seconds = 30.0;        ///< slower blocks cause a warning
  double abandon_seconds = 300.0;     ///< slower blocks fail with ETIMEDOUT
  bool sqpoll = false;                ///< io_uring: a kernel thread submits (IORING_SETUP_SQPOLL)
  bool iopoll = false;                ///< io_uring: poll for completions instead of using
                                      ///< interrupts
};

/// Files and memory that a queue registers once instead of per transfer: io_uring keeps files open
/// and memory pinned (IORING_REGISTER_FILES, IORING_REGISTER_BUFFERS). Transfers may use others,
/// too. Both must outlive the queue. Memory that cannot be registered (RLIMIT_MEMLOCK) is logged
/// once and used unregistered.
struct Registration {
  std::vector<const File*> files;
  std::vector<HostBytes> memory;
};

/// An implementation of asynchronous I/O and whether this machine supports it.
struct Backend {
  std::string name;
  bool usable = false;
  bool moves_data = true;  ///< false: only measures the queue's overhead
  std::string
      reason;  ///< reason for refusal, or a description ("kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN")
};

/// Every backend in order of preference, probed now: io_uring is refused with the reason when it is
/// compiled out, denied by seccomp or sysctl, or lacks an opcode. The last one, "null", moves
/// no data and is never chosen by "auto": it measures the queue's own cost. The environment
/// variable BALLAST_IO_DISABLE (names with commas between) makes probes fail, for tests.
std::vector<Backend> probe_backends();

/// Makes a queue. "auto" takes the first usable backend and logs why a better one was refused; a
/// name that is not usable throws Error(io) with the reason. The environment variable
/// BALLAST_IO_FAULTS (aio/README.md) injects faults, for tests, with a warning in the log.
std::unique_ptr<Queue> make_queue(const QueueOptions& options,
                                  const Registration& registration = {});

}  // namespace ballast::aio
