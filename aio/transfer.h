#pragma once

#include <chrono>
#include <cstdint>

#include "ballast/aio/queue.h"

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

}  // namespace ballast::aio
