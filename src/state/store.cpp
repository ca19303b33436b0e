#include "ballast/state/store.h"

#include <functional>
#include <set>
#include <utility>

#include "ballast/core/error.h"

#include "src/state/swap_space.h"

namespace ballast::state {
namespace {

/// Sum of the buffers of `tier`, each rounded up to whole pages as the allocators do.
Bytes paged_bytes(const schedule::Schedule& schedule, Tier tier) {
  Bytes sum = 0;
  for (const auto& buffer : schedule.buffers) {
    if (buffer.tier == tier) sum += round_up(buffer.bytes, kPage);
  }
  return sum;
}

bool moves_to_or_from_nvme(const schedule::Operation& operation) {
  return operation.lane == schedule::Lane::fetch || operation.lane == schedule::Lane::writeback;
}

/// The host buffers of all transfers to and from NVMe; adjacent ones are merged.
std::vector<HostBytes> staging_memory(const schedule::Schedule& schedule,
                                      const std::function<HostBytes(schedule::BufferId)>& place) {
  std::set<schedule::BufferId> ids;
  for (const auto* plan : {&schedule.first, &schedule.steady, &schedule.flush, &schedule.evaluation,
                           &schedule.rollback}) {
    for (const auto& operation : plan->operations) {
      if (!moves_to_or_from_nvme(operation)) continue;
      for (const auto& use : operation.uses) {
        if (schedule.buffers.at(use.buffer).tier == Tier::host) ids.insert(use.buffer);
      }
    }
  }
  std::vector<HostBytes> pieces;
  for (const schedule::BufferId id : ids) {
    const HostBytes bytes = place(id);
    if (!pieces.empty() && pieces.back().data() + pieces.back().size() == bytes.data()) {
      pieces.back() = {pieces.back().data(), pieces.back().size() + bytes.size()};
    } else {
      pieces.push_back(bytes);
    }
  }
  return pieces;
}

}  // namespace

std::vector<Bytes> swap_extents(const schedule::Schedule& schedule) {
  std::vector<Bytes> extents;
  for (const auto& buffer : schedule.buffers) {
    if (buffer.tier == Tier::nvme) extents.push_back(round_up(buffer.bytes, kPage));
  }
  return extents;
}

Store::Store(const schedule::Schedule& schedule, device::Device& device,
             const std::optional<SwapPlan>& swap)
    : device_(device),
      pool_(paged_bytes(schedule, Tier::host)),
      pin_(device.pin(pool_.memory(), "ballast.host_bytes")) {
  std::size_t extents = 0;
  allocations_.reserve(schedule.buffers.size());
  for (const auto& buffer : schedule.buffers) {
    Allocation allocation;
    switch (buffer.tier) {
      case Tier::device:
        allocation.device = device.allocate(buffer.bytes, buffer.name);
        break;
      case Tier::host:
        allocation.host = pool_.allocate(buffer.bytes, buffer.name);
        break;
      case Tier::nvme:
        allocation.extent = extents++;
        break;
    }
    allocations_.push_back(allocation);
  }
  if (extents == 0) return;
  expects(swap && swap->stripe.extents() == extents,
          "store: the swap plan does not match the schedule");
  const auto staging =
      staging_memory(schedule, [this](schedule::BufferId id) { return allocations_.at(id).host; });
  swap_ = std::make_unique<SwapSpace>(*swap, staging);
}

Store::~Store() = default;

HostBytes Store::host(schedule::BufferId id, Bytes bytes) const {
  const HostBytes whole = allocations_.at(id).host;
  expects(bytes <= whole.size(), "store: the host buffer is too small or on another tier");
  return whole.first(bytes);
}

DeviceBytes Store::device(schedule::BufferId id, Bytes bytes) const {
  const DeviceBytes whole = allocations_.at(id).device;
  expects(bytes <= whole.size(), "store: the device buffer is too small or on another tier");
  return whole.subview(0, bytes);
}

std::unique_ptr<Transfer> Store::fetch(schedule::BufferId home, HostBytes data, bool ahead) {
  const Allocation& at = allocations_.at(home);
  expects(at.extent.has_value(), "store: not an NVMe buffer");
  return swap_->read(*at.extent, data, at.version, ahead);
}

std::unique_ptr<Transfer> Store::writeback(schedule::BufferId home, HostBytes data,
                                           Bytes zeros_from) {
  Allocation& at = allocations_.at(home);
  expects(at.extent.has_value(), "store: not an NVMe buffer");
  return swap_->write(*at.extent, data, ++at.version, zeros_from);
}

void Store::exchange(schedule::BufferId home, schedule::BufferId other) {
  Allocation& current = allocations_.at(home);
  Allocation& before = allocations_.at(other);
  expects(current.extent && before.extent, "store: not NVMe buffers");
  std::swap(current.extent, before.extent);
  std::swap(current.version, before.version);
}

Bytes Store::allocated(Tier tier) const {
  switch (tier) {
    case Tier::device:
      return device_.allocated();
    case Tier::host:
      return pool_.allocated();
    case Tier::nvme:
      return swap_ ? swap_->stripe().bytes() : 0;
  }
  return 0;
}

std::vector<Bytes> Store::nvme_bytes_written() const {
  std::vector<Bytes> written;
  if (!swap_) return written;
  for (const auto& counters : swap_->counters()) written.push_back(counters.bytes_written);
  return written;
}

std::string_view Store::io_backend() const {
  return swap_ ? std::string_view(swap_->backend()) : "";
}

}  // namespace ballast::state
