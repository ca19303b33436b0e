#pragma once

#include <memory>
#include <string>

#include "aio/transport.h"

namespace ballast::aio {

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
