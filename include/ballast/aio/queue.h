#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/core/lease.h"

namespace ballast::aio {

enum class Direction : std::uint8_t { read, write };

/// One transfer between `lease` and [offset, offset + lease.bytes().size()) of `file`. Any length;
/// the queue splits it into blocks. `file` must outlive the completion.
struct Request {
  Direction direction = Direction::read;
  const File* file = nullptr;
  Bytes offset = 0;
  Lease lease;
};

/// Names a submitted request; good for one wait().
struct Ticket {
  std::uint64_t id = 0;
};

/// How a request ended: a value, never an exception. Complete success is `error_number == 0` and
/// `transferred` equal to the requested length; short transfers have been continued, EINTR and
/// EAGAIN retried, so anything else is final. A read past the end of the file is EIO.
struct [[nodiscard]] Completion {
  Direction direction = Direction::read;
  int error_number = 0;
  Bytes transferred = 0;
  Bytes offset = 0;
  Bytes length = 0;
  std::string file;

  [[nodiscard]] bool ok() const { return error_number == 0 && transferred == length; }
  /// Throws Error(io) "<stage>: write FILE offset=.. length=..: <strerror>" unless ok().
  void check(std::string_view stage) const;
};

/// Totals since the queue was made.
struct QueueCounters {
  Bytes bytes_read = 0;
  Bytes bytes_written = 0;
  std::uint64_t blocks = 0;
  /// Blocks that came back short and were continued.
  std::uint64_t continued = 0;
};

/// Asynchronous transfers to and from files. Thread-safe: several lanes may share one queue. Reads
/// are started before queued writes. The destructor finishes what was submitted.
class Queue {
 public:
  virtual ~Queue() = default;
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// Takes the request and its lease; never blocks on I/O. The lease ends when the transfer is
  /// finished, before wait() returns. Throws Error(state) when offset, length or address break
  /// file.alignment(), or the range lies outside the file.
  [[nodiscard]] virtual Ticket submit(Request request) = 0;

  /// Blocks until the request is finished. Each ticket is waited for once.
  virtual Completion wait(Ticket ticket) = 0;

  /// "io_uring" or "threads".
  [[nodiscard]] virtual std::string_view backend() const = 0;
  [[nodiscard]] virtual QueueCounters counters() const = 0;
};

/// Settings of a queue; DeepSpeed's `aio` section.
struct QueueOptions {
  std::string backend = "auto";  ///< auto, io_uring or threads
  Bytes block_bytes = 1 * kMiB;  ///< largest single transfer
  unsigned depth = 32;           ///< blocks in flight
};

/// One way of doing asynchronous I/O and whether this machine offers it.
struct Backend {
  std::string name;
  bool usable = false;
  std::string reason;  ///< why not, or what was chosen ("kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN")
};

/// Every backend in order of preference, probed now: io_uring is refused with the reason when it is
/// compiled out, denied by seccomp or sysctl, or lacks an opcode. The environment variable
/// BALLAST_IO_DISABLE (a backend's name) makes its probe fail, for tests.
std::vector<Backend> probe_backends();

/// Makes a queue. "auto" takes the first usable backend and logs why a better one was refused; a
/// name that is not usable throws Error(io) with the reason.
std::unique_ptr<Queue> make_queue(const QueueOptions& options);

}  // namespace ballast::aio
