#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string_view>

#include "ballast/device/device.h"
#include "ballast/schedule/executor.h"
#include "ballast/state/store.h"

namespace ballast::engine {

/// A stream of the device and the ends of the operations on it that are enqueued and not over, at
/// most schedule::kMostEnqueued. One thread enqueues, another waits.
class QueuedStream {
 public:
  QueuedStream(device::Device& device, std::string_view name);

  [[nodiscard]] device::Stream& stream() { return *stream_; }
  /// Behind the last piece of an operation's work.
  void end_operation();
  /// Blocks until the first operation is over that nobody has waited for yet. Throws what its work
  /// has raised.
  void finish_operation();

 private:
  std::unique_ptr<device::Stream> stream_;
  std::array<std::unique_ptr<device::Event>, schedule::kMostEnqueued> ends_;
  std::size_t ended_ = 0;     ///< operations so far; of the thread that enqueues
  std::size_t finished_ = 0;  ///< of the one that waits
};

/// Transfers of a lane that are started and not finished, at most schedule::kMostEnqueued. One
/// thread starts, another finishes.
class TransferQueue {
 public:
  void add(std::unique_ptr<state::Transfer> transfer);
  /// Finishes the first transfer that is not yet. Throws what became of it.
  void finish_operation();

 private:
  std::array<std::unique_ptr<state::Transfer>, schedule::kMostEnqueued> transfers_;
  std::size_t added_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace ballast::engine
