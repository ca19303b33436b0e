#include "src/engine/queued_lane.h"

#include <utility>

namespace ballast::engine {

QueuedStream::QueuedStream(device::Device& device, std::string_view name)
    : stream_(device.make_stream(name)) {
  for (auto& end : ends_) end = device.make_event();
}

void QueuedStream::end_operation() {
  ends_[ended_++ % ends_.size()]->record(*stream_);
}

void QueuedStream::finish_operation() {
  ends_[finished_++ % ends_.size()]->synchronize();
}

void TransferQueue::add(std::unique_ptr<state::Transfer> transfer) {
  transfers_[added_++ % transfers_.size()] = std::move(transfer);
}

void TransferQueue::finish_operation() {
  const auto transfer = std::move(transfers_[finished_++ % transfers_.size()]);
  transfer->finish();
}

}  // namespace ballast::engine
