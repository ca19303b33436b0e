#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string_view>

#include "ballast/device/device.h"
#include "ballast/schedule/executor.h"

namespace ballast::engine {

/// The stream of a queued lane (schedule::is_queued) and the ends of operations on it that are
/// enqueued and not over, at most schedule::kMostEnqueued. One thread enqueues, another waits.
class QueuedLane {
 public:
  QueuedLane(device::Device& device, std::string_view name);

  [[nodiscard]] device::Stream& stream() { return *stream_; }
  /// Behind the last piece of an operation's work.
  void end_operation();
  /// Blocks until the first operation is over that nobody has waited for yet. Throws what its work
  /// has raised.
  void await_operation();

 private:
  std::unique_ptr<device::Stream> stream_;
  std::array<std::unique_ptr<device::Event>, schedule::kMostEnqueued> ends_;
  std::size_t ended_ = 0;    ///< operations so far; of the thread that enqueues
  std::size_t awaited_ = 0;  ///< of the one that waits
};

}  // namespace ballast::engine
