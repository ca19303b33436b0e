#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ballast/aio/queue.h"

namespace ballast::aio {

/// One contiguous transfer as a transport sees it. Its address identifies it from start() until
/// reap() returns it.
struct Block {
  Direction direction = Direction::read;
  int descriptor = -1;
  std::byte* data = nullptr;
  std::size_t length = 0;
  Bytes offset = 0;
  /// Set by the transport: bytes transferred, or -errno.
  long result = 0;
};

/// Transfers single blocks between memory and files, without requests or retries.
/// BlockQueue's owner thread makes, uses and destroys it; only wake() may be called from other
/// threads.
class Transport {
 public:
  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Starts `block`, which stays in place until reap() returns it. Never blocks on I/O. A failure
  /// to start is reported as the block's result.
  virtual void start(Block& block) = 0;

  /// Blocks until `wanted` of the started blocks are finished (at least one is in flight for each
  /// that is wanted), wake() was called since the last reap(), or `patience` is over; may return
  /// earlier. Appends the finished blocks, in any order.
  virtual void reap(std::vector<Block*>& finished, unsigned wanted,
                    std::chrono::milliseconds patience) = 0;

  /// Makes the present or next reap() return. Thread-safe.
  virtual void wake() noexcept = 0;
};

/// Describes the usable io_uring ("kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN"). Throws Error(io) with
/// the reason when it is not usable.
std::string probe_uring();

/// A transport over io_uring with room for `depth` blocks; it uses sqpoll and iopoll of `options`.
/// Throws Error(io).
std::unique_ptr<Transport> make_uring_transport(unsigned depth, const QueueOptions& options = {},
                                                const Registration& registration = {});

/// More threads than this gain nothing on any device.
inline constexpr unsigned kMaxThreads = 64;

/// A transport over `depth` (at most kMaxThreads) threads that pread and pwrite, so that every
/// block in flight is at the device. Throws Error(io).
std::unique_ptr<Transport> make_thread_transport(unsigned depth);

/// A transport that completes every block without moving data.
std::unique_ptr<Transport> make_null_transport();

/// Returns `transport`. In builds with tests, wraps it to inject the faults in the environment
/// variable BALLAST_IO_FAULTS, with a warning in the log. Throws Error(config).
std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> transport);

}  // namespace ballast::aio
