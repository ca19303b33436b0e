#include "ballast/state/store.h"

#include "ballast/core/error.h"

namespace ballast::state {
namespace {

/// Sum of the buffers of `tier` as allocators round them: to whole pages.
Bytes paged_bytes(const schedule::Schedule& schedule, Tier tier) {
  Bytes sum = 0;
  for (const auto& buffer : schedule.buffers) {
    if (buffer.tier == tier) sum += round_up(buffer.bytes, kPage);
  }
  return sum;
}

std::unique_ptr<SwapFile> make_swap(const schedule::Schedule& schedule,
                                    const std::filesystem::path& directory,
                                    const aio::QueueOptions& io) {
  const Bytes bytes = paged_bytes(schedule, Tier::nvme);
  return bytes == 0 ? nullptr : std::make_unique<SwapFile>(directory, bytes, io);
}

}  // namespace

Store::Store(const schedule::Schedule& schedule, device::Device& device,
             const std::filesystem::path& swap_directory, const aio::QueueOptions& io)
    : device_(device),
      pool_(paged_bytes(schedule, Tier::host)),
      swap_(make_swap(schedule, swap_directory, io)) {
  places_.reserve(schedule.buffers.size());
  for (const auto& buffer : schedule.buffers) {
    Place place;
    switch (buffer.tier) {
      case Tier::device:
        place.device = device.allocate(buffer.bytes, buffer.name);
        break;
      case Tier::host:
        place.host = pool_.allocate(buffer.bytes, buffer.name);
        break;
      case Tier::nvme:
        place.extent = swap_->allocate(buffer.bytes);
        break;
    }
    places_.push_back(place);
  }
}

Store::~Store() = default;

HostBytes Store::host(schedule::BufferId id, Bytes bytes) const {
  const HostBytes whole = places_.at(id).host;
  expects(bytes <= whole.size(), "store: not a host buffer of that size");
  return whole.first(bytes);
}

DeviceBytes Store::device(schedule::BufferId id, Bytes bytes) const {
  const DeviceBytes whole = places_.at(id).device;
  expects(bytes <= whole.size(), "store: not a device buffer of that size");
  return whole.subview(0, bytes);
}

void Store::fetch(schedule::BufferId home, HostBytes data) {
  const Place& place = places_.at(home);
  expects(place.extent.bytes >= data.size(), "store: not an NVMe buffer of that size");
  swap_->read(place.extent, data, place.version);
}

void Store::writeback(schedule::BufferId home, HostBytes data) {
  Place& place = places_.at(home);
  expects(place.extent.bytes >= data.size(), "store: not an NVMe buffer of that size");
  swap_->write(place.extent, data, place.version + 1);
  ++place.version;
}

Bytes Store::allocated(Tier tier) const {
  switch (tier) {
    case Tier::device:
      return device_.allocated();
    case Tier::host:
      return pool_.allocated();
    case Tier::nvme:
      return swap_ ? swap_->allocated() : 0;
  }
  return 0;
}

Bytes Store::nvme_bytes_written() const {
  return swap_ ? swap_->counters().bytes_written : 0;
}

std::string_view Store::io_backend() const {
  return swap_ ? swap_->backend() : "";
}

}  // namespace ballast::state
