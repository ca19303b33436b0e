#include "src/engine/queued_lane.h"

namespace ballast::engine {

QueuedLane::QueuedLane(device::Device& device, std::string_view name)
    : stream_(device.make_stream(name)) {
  for (auto& end : ends_) end = device.make_event();
}

void QueuedLane::end_operation() {
  ends_[ended_++ % ends_.size()]->record(*stream_);
}

void QueuedLane::await_operation() {
  ends_[awaited_++ % ends_.size()]->synchronize();
}

}  // namespace ballast::engine
