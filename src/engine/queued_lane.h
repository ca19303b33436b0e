#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "ballast/device/device.h"
#include "ballast/plan/executor.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"

namespace ballast::engine {

/// A device stream and the end events of the unfinished operations of a lane on it, at most
/// plan::kMostOnFastStream. One thread enqueues, another waits, and all may let other streams wait.
class QueuedStream {
 public:
  QueuedStream(device::Device& device, std::string_view name)
      : QueuedStream(device, device.make_stream(name)) {}
  /// A lane that shares its stream with another one.
  QueuedStream(device::Device& device, std::shared_ptr<device::Stream> stream)
      : stream_(std::move(stream)) {
    for (End& end : ends_) end.event = device.make_event();
  }

  [[nodiscard]] device::Stream& stream() { return *stream_; }
  /// Call it after all work of `operation` of this submission is enqueued.
  void end_operation(const plan::Operation& operation, std::uint64_t submission) {
    const std::scoped_lock lock(mutex_);
    End& end = ends_[ended_++ % ends_.size()];
    end.operation = &operation;
    end.submission = submission;
    end.event->record(*stream_);
  }
  /// Makes `other` wait until `operation`, which was enqueued, is over.
  void let_wait(device::Stream& other, const plan::Operation& operation, std::uint64_t submission) {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = finished_; i < ended_; ++i) {
      const End& end = ends_[i % ends_.size()];
      if (end.operation == &operation && end.submission == submission) end.event->wait_on(other);
    }
  }
  /// Blocks until the first unfinished operation has finished. Rethrows the Error of its work.
  void finish_operation() {
    // Its event is not recorded again before the operation has finished.
    std::exception_ptr error;
    try {
      ends_[finished_ % ends_.size()].event->synchronize();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::scoped_lock lock(mutex_);
      ++finished_;
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  struct End {
    std::unique_ptr<device::Event> event;
    const plan::Operation* operation = nullptr;
    std::uint64_t submission = 0;
  };

  std::shared_ptr<device::Stream> stream_;
  std::mutex mutex_;
  std::array<End, plan::kMostOnFastStream> ends_;
  std::size_t ended_ = 0;     ///< changed by the enqueueing thread
  std::size_t finished_ = 0;  ///< changed by the waiting thread
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
