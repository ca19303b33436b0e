#pragma once

#include <memory>
#include <string>

#include "aio/transport.h"

namespace ballast::aio {

/// What io_uring offers here ("kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN"). Throws Error(io) with the
/// reason when it is not usable.
std::string probe_uring();

/// A transport over io_uring with room for `depth` blocks. Throws Error(io).
std::unique_ptr<Transport> make_uring_transport(unsigned depth);

/// A transport over threads that pread and pwrite, one per block in flight. Throws Error(io).
std::unique_ptr<Transport> make_thread_transport(unsigned depth);

}  // namespace ballast::aio
