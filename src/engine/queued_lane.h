#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "ballast/device/device.h"
#include "ballast/plan/executor.h"
#include "ballast/state/store.h"

namespace ballast::engine {

/// A device stream and the end events of its unfinished operations, at most
/// plan::kMostOnFastStream. One thread enqueues, another waits.
class QueuedStream {
 public:
  QueuedStream(device::Device& device, std::string_view name) : stream_(device.make_stream(name)) {
    for (auto& end : ends_) end = device.make_event();
  }

  [[nodiscard]] device::Stream& stream() { return *stream_; }
  /// Call it after all work of an operation is enqueued.
  void end_operation() { ends_[ended_++ % ends_.size()]->record(*stream_); }
  /// Blocks until the first unfinished operation has finished. Rethrows the Error of its work.
  void finish_operation() { ends_[finished_++ % ends_.size()]->synchronize(); }

 private:
  std::unique_ptr<device::Stream> stream_;
  std::array<std::unique_ptr<device::Event>, plan::kMostOnFastStream> ends_;
  std::size_t ended_ = 0;     ///< used by the enqueueing thread
  std::size_t finished_ = 0;  ///< used by the waiting thread
};

/// Unfinished transfers of a lane, at most plan::kMostEnqueued. One thread starts them, another
/// finishes them.
class TransferQueue {
 public:
  /// `transfer`: null for an operation that has nothing to do.
  void add(std::unique_ptr<state::SwapTransfer> transfer) {
    transfers_[added_++ % transfers_.size()] = std::move(transfer);
  }
  /// Finishes the first unfinished transfer. Rethrows its Error.
  void finish_operation() {
    const auto transfer = std::move(transfers_[finished_++ % transfers_.size()]);
    if (transfer) transfer->finish();
  }

 private:
  std::array<std::unique_ptr<state::SwapTransfer>, plan::kMostEnqueued> transfers_;
  std::size_t added_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace ballast::engine
