#include "ballast/state/store.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::state {

HomeExtents::HomeExtents(std::span<const Bytes> extents, std::size_t homes)
    : sizes_(extents.begin(), extents.end()),
      extents_(homes),
      in_use_(extents.size(), false),
      keepers_(extents.size(), 0) {
  expects(homes <= extents.size(), "slots: fewer extents than homes");
  std::iota(extents_.begin(), extents_.end(), 0);
  std::fill_n(in_use_.begin(), homes, true);
  for (std::size_t e = extents.size(); e-- > homes;) free_[sizes_[e]].push_back(e);
}

std::size_t HomeExtents::extent(std::size_t home) const {
  const std::lock_guard lock(mutex_);
  return extents_.at(home);
}

std::size_t HomeExtents::take_free(Bytes size) {
  auto& free = free_[size];
  expects(!free.empty(), "slots: checkpoints keep all extents of this size");
  const std::size_t taken = free.back();
  free.pop_back();
  in_use_[taken] = true;
  return taken;
}

std::size_t HomeExtents::for_writing(std::size_t home) {
  const std::lock_guard lock(mutex_);
  std::size_t& extent = extents_.at(home);
  if (keepers_[extent] == 0) return extent;
  const std::size_t other = take_free(sizes_[extent]);
  in_use_[extent] = false;
  return extent = other;
}

void HomeExtents::exchange(std::size_t home, std::size_t other) {
  const std::lock_guard lock(mutex_);
  std::swap(extents_.at(home), extents_.at(other));
}

void HomeExtents::keep(std::uint64_t checkpoint, std::span<const std::size_t> homes) {
  const std::lock_guard lock(mutex_);
  auto& kept = kept_[checkpoint];
  expects(kept.empty(), "slots: the checkpoint keeps extents already");
  for (const std::size_t home : homes) {
    kept.push_back(extents_.at(home));
    ++keepers_[kept.back()];
  }
}

void HomeExtents::release(std::uint64_t checkpoint) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(checkpoint);
  if (found == kept_.end()) return;
  for (const std::size_t extent : found->second) {
    if (--keepers_[extent] == 0 && !in_use_[extent]) free_[sizes_[extent]].push_back(extent);
  }
  kept_.erase(found);
}

std::vector<std::uint64_t> HomeExtents::checkpoints() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> found;
  for (const auto& [checkpoint, extents] : kept_) found.push_back(checkpoint);
  return found;
}

void HomeExtents::restore(std::span<const std::pair<std::size_t, std::size_t>> homes,
                          const std::map<std::uint64_t, std::vector<std::size_t>>& kept) {
  const std::lock_guard lock(mutex_);
  std::vector<Bytes> wanted;
  for (const std::size_t extent : extents_) wanted.push_back(sizes_[extent]);
  in_use_.assign(sizes_.size(), false);
  keepers_.assign(sizes_.size(), 0);
  kept_ = kept;
  for (const auto& [checkpoint, extents] : kept_) {
    for (const std::size_t extent : extents) ++keepers_.at(extent);
  }
  std::vector<bool> placed(extents_.size(), false);
  for (const auto& [home, extent] : homes) {
    expects(sizes_.at(extent) == wanted.at(home) && !in_use_[extent],
            "slots: a home cannot have this extent");
    extents_[home] = extent;
    in_use_[extent] = placed[home] = true;
  }
  free_.clear();
  for (std::size_t e = sizes_.size(); e-- > 0;) {
    if (!in_use_[e] && keepers_[e] == 0) free_[sizes_[e]].push_back(e);
  }
  for (std::size_t home = 0; home < extents_.size(); ++home) {
    if (!placed[home]) extents_[home] = take_free(wanted[home]);
  }
}

namespace {

/// Total size of the buffers of `tier`, each rounded up to whole pages like in the allocators.
Bytes paged_bytes(const plan::Schedule& schedule, Tier tier) {
  Bytes sum = 0;
  for (const auto& buffer : schedule.buffers) {
    if (buffer.tier == tier) sum += round_up(buffer.bytes, kPage);
  }
  return sum;
}

bool is_kept(const plan::Buffer& buffer) {
  return buffer.kind == plan::Kind::checkpoints;
}

bool moves_to_or_from_nvme(const plan::Operation& operation) {
  return operation.lane == plan::Lane::fetch || operation.lane == plan::Lane::writeback;
}

/// Host buffers of all transfers to and from NVMe, with adjacent ones merged.
std::vector<HostBytes> staging_memory(const plan::Schedule& schedule,
                                      const std::function<HostBytes(plan::BufferId)>& place) {
  std::set<plan::BufferId> ids;
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
  for (const plan::BufferId id : ids) {
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

std::vector<Bytes> swap_extents(const plan::Schedule& schedule) {
  std::vector<Bytes> extents;
  for (const bool kept : {false, true}) {
    for (const auto& buffer : schedule.buffers) {
      if (buffer.tier != Tier::nvme || is_kept(buffer) != kept) continue;
      extents.push_back(round_up(buffer.bytes, kPage));
    }
  }
  return extents;
}

std::optional<SwapPlan> plan_swap(const SwapOptions& options, const plan::Schedule& schedule,
                                  std::uint32_t kept, const SwapImage& here, bool& reused) {
  const std::vector<Bytes> extents = swap_extents(schedule);
  if (extents.empty()) return std::nullopt;
  if (auto plan = reuse_swap(options, extents, here)) {
    reused = true;
    return plan;
  }
  try {
    return plan_swap(options, extents);
  } catch (const Error& error) {
    if (kept == 0) throw;
    throw error.with_context(fmt::format(
        "with the states that checkpoints keep on NVMe (ballast.checkpoint_keep is {})", kept));
  }
}

Store::Store(const plan::Schedule& schedule, std::vector<device::Device*> devices,
             const std::optional<SwapPlan>& swap)
    : devices_(std::move(devices)),
      pool_(paged_bytes(schedule, Tier::host)),
      allocations_(schedule.buffers.size()) {
  allocate_on_host(schedule);
  std::size_t homes = 0;
  for (plan::BufferId id = 0; id < schedule.buffers.size(); ++id) {
    const plan::Buffer& buffer = schedule.buffers[id];
    if (buffer.tier == Tier::device) {
      allocations_[id].device = devices_.at(buffer.device)->allocate(buffer.bytes, buffer.name);
    } else if (buffer.tier == Tier::nvme && !is_kept(buffer)) {
      allocations_[id].home = homes++;
    }
  }
  if (homes == 0) return;
  expects(swap && swap->stripe.extents() >= homes,
          "store: the swap plan does not match the schedule");
  const auto staging =
      staging_memory(schedule, [this](plan::BufferId id) { return allocations_.at(id).host; });
  swap_ = std::make_unique<SwapSpace>(*swap, staging);
  extents_ = std::make_unique<HomeExtents>(swap_->image().extents, homes);
}

Store::~Store() = default;

/// Host buffers of a device are adjacent, so that it pins one range. Otherwise huge pages would end
/// at every change of the device.
void Store::allocate_on_host(const plan::Schedule& schedule) {
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const Bytes first = pool_.allocated();
    for (plan::BufferId id = 0; id < schedule.buffers.size(); ++id) {
      const plan::Buffer& buffer = schedule.buffers[id];
      if (buffer.tier != Tier::host || buffer.device != d) continue;
      allocations_[id].host = pool_.allocate(buffer.bytes, buffer.name);
    }
    const HostBytes range = pool_.memory().subspan(first, pool_.allocated() - first);
    if (!range.empty()) pins_.push_back(devices_[d]->pin(range, "ballast.host_bytes"));
  }
}

Bytes Store::pinned() const {
  return std::accumulate(
      pins_.begin(), pins_.end(), Bytes{0},
      [](Bytes sum, const std::unique_ptr<device::Pin>& pin) { return sum + pin->bytes(); });
}

HostBytes Store::host(plan::BufferId id, Bytes bytes) const {
  const HostBytes whole = allocations_.at(id).host;
  expects(bytes <= whole.size(), "store: the host buffer is too small or on another tier");
  return whole.first(bytes);
}

DeviceBytes Store::device(plan::BufferId id, Bytes bytes) const {
  const DeviceBytes whole = allocations_.at(id).device;
  expects(bytes <= whole.size(), "store: the device buffer is too small or on another tier");
  return whole.subview(0, bytes);
}

std::unique_ptr<SwapTransfer> Store::fetch(plan::BufferId home, HostBytes data, bool ahead) {
  const Allocation& at = allocations_.at(home);
  expects(at.home.has_value(), "store: not an NVMe buffer");
  return swap_->read(extents_->extent(*at.home), data, at.version, ahead);
}

std::unique_ptr<SwapTransfer> Store::writeback(plan::BufferId home, HostBytes data,
                                               Bytes zeros_from) {
  Allocation& at = allocations_.at(home);
  expects(at.home.has_value(), "store: not an NVMe buffer");
  return swap_->write(extents_->for_writing(*at.home), data, ++at.version, zeros_from);
}

void Store::exchange(plan::BufferId home, plan::BufferId other) {
  Allocation& current = allocations_.at(home);
  Allocation& before = allocations_.at(other);
  expects(current.home && before.home, "store: not NVMe buffers");
  extents_->exchange(*current.home, *before.home);
  std::swap(current.version, before.version);
}

std::vector<KeptExtent> Store::keep(std::uint64_t checkpoint,
                                    std::span<const plan::BufferId> homes) {
  std::vector<std::size_t> numbers;
  std::vector<KeptExtent> kept;
  for (const plan::BufferId id : homes) {
    const std::size_t home = allocations_.at(id).home.value();
    const std::size_t extent = extents_->extent(home);
    numbers.push_back(home);
    kept.push_back({extent, swap_->checksums(extent)});
  }
  swap_->sync();
  extents_->keep(checkpoint, numbers);
  return kept;
}

void Store::release(std::uint64_t checkpoint) {
  if (extents_) extents_->release(checkpoint);
}

std::vector<std::uint64_t> Store::kept() const {
  return extents_ ? extents_->checkpoints() : std::vector<std::uint64_t>{};
}

void Store::restore(std::span<const std::pair<plan::BufferId, KeptExtent>> homes,
                    const KeptExtents& kept) {
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (const auto& [id, held] : homes) {
    Allocation& at = allocations_.at(id);
    places.emplace_back(at.home.value(), held.extent);
    swap_->restore(held.extent, held.checksums, at.version);
  }
  extents_->restore(places, kept);
}

Bytes Store::allocated(Tier tier) const {
  switch (tier) {
    case Tier::device:
      return std::accumulate(
          devices_.begin(), devices_.end(), Bytes{0},
          [](Bytes sum, const device::Device* device) { return sum + device->allocated(); });
    case Tier::host:
      return pool_.allocated();
    case Tier::nvme:
      return swap_ ? swap_->stripe().bytes() : 0;
  }
  return 0;
}

}  // namespace ballast::state
