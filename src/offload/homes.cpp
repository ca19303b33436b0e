#include "src/offload/homes.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

/// One that is updated, two that are read, two that are written.
constexpr std::size_t kStaging = 5;
constexpr std::size_t kAhead = 2;

Bytes largest_group(const Layout& layout) {
  Bytes largest = 0;
  for (const SubGroup& group : layout.sub_groups()) largest = std::max(largest, group.bytes);
  return largest;
}

}  // namespace

Homes::Homes(const Layout& layout, const cpu_adam::Updater& updater, const Place& place)
    : layout_(layout), homes_(layout.sub_groups().size()) {
  const Bytes largest = largest_group(layout);
  const std::size_t buffers = place.nvme ? std::min(kStaging, homes_.size()) : 0;
  std::vector<Bytes> extents;
  place_groups(place, buffers * largest, extents);
  Bytes host = extents.empty() ? 0 : buffers * largest;
  for (std::size_t i = 0; i < resident_; ++i) host += layout.sub_groups()[i].bytes;
  std::optional<state::SwapPlan> plan;
  if (!extents.empty()) plan = state::plan_swap(*place.nvme, extents);
  memory_ = updater.allocate(host);
  HostBytes free = memory_.bytes();
  const auto take = [&free](Bytes bytes) {
    const HostBytes taken = free.first(bytes);
    free = free.subspan(bytes);
    return taken;
  };
  for (std::size_t i = 0; i < resident_; ++i) {
    homes_[i].memory = take(layout.sub_groups()[i].bytes);
  }
  if (extents.empty()) return;
  staging_.resize(buffers);
  std::vector<HostBytes> registered;
  for (Staging& staging : staging_) {
    staging.memory = take(largest);
    registered.push_back(staging.memory);
  }
  swap_ = std::make_unique<state::SwapSpace>(*plan, registered);
}

Homes::~Homes() {
  // Transfers wait for their requests.
  staging_.clear();
}

void Homes::place_groups(const Place& place, Bytes staging, std::vector<Bytes>& extents) {
  resident_ = homes_.size();
  if (!place.nvme) return;
  const Bytes budget = place.host_bytes.value_or(staging);
  if (budget >= layout_.bytes() && place.host_bytes) return;
  if (budget < staging) {
    throw Error(ErrorCategory::config,
                fmt::format("host_bytes: {} are too few; the buffers between memory and NVMe "
                            "need {}",
                            format_bytes(budget), format_bytes(staging)));
  }
  Bytes left = budget - staging;
  resident_ = 0;
  while (resident_ < homes_.size() && layout_.sub_groups()[resident_].bytes <= left) {
    left -= layout_.sub_groups()[resident_++].bytes;
  }
  for (std::size_t i = resident_; i < homes_.size(); ++i) {
    homes_[i].extent = extents.size();
    extents.push_back(layout_.sub_groups()[i].bytes);
  }
}

Homes::Staging* Homes::find(std::size_t group) {
  const auto found = std::find_if(staging_.begin(), staging_.end(),
                                  [group](const Staging& s) { return s.group == group; });
  return found == staging_.end() ? nullptr : &*found;
}

Homes::Staging& Homes::take_staging() {
  while (staging_[turn_ % staging_.size()].in_use) ++turn_;
  Staging& staging = staging_[turn_++ % staging_.size()];
  staging.group.reset();
  if (staging.reading) std::exchange(staging.reading, nullptr)->finish();
  if (staging.writing) std::exchange(staging.writing, nullptr)->finish();
  return staging;
}

Homes::Staging& Homes::start_read(std::size_t group, bool ahead) {
  Staging& staging = take_staging();
  const Home& home = homes_[group];
  const HostBytes memory = staging.memory.first(layout_.sub_groups()[group].bytes);
  if (home.version == 0) {
    std::memset(memory.data(), 0, memory.size());
  } else {
    staging.reading = swap_->read(home.extent, memory, home.version, ahead);
  }
  staging.group = group;
  return staging;
}

void Homes::read_after(std::size_t group, std::size_t count) {
  const std::size_t swapped = homes_.size() - resident_;
  for (std::size_t i = 0; i < std::min({count, swapped, staging_.size() - 1}); ++i) {
    const std::size_t next =
        group < resident_ ? resident_ + i : resident_ + (group - resident_ + 1 + i) % swapped;
    if (find(next) == nullptr) start_read(next, true);
  }
}

HostBytes Homes::acquire(std::size_t group, bool ahead) {
  if (resident(group)) {
    // A pass begins: the disk reads while resident sub-groups are updated.
    if (ahead && group == 0 && swap_) read_after(group, kAhead);
    return homes_[group].memory;
  }
  Staging* staging = find(group);
  if (staging == nullptr) staging = &start_read(group, false);
  staging->in_use = true;
  if (staging->reading) {
    try {
      std::exchange(staging->reading, nullptr)->finish();
    } catch (...) {
      staging->in_use = false;
      staging->group.reset();
      throw;
    }
  }
  // The caller may change what is still being written.
  if (staging->writing) std::exchange(staging->writing, nullptr)->finish();
  if (ahead) read_after(group, kAhead);
  return staging->memory.first(layout_.sub_groups()[group].bytes);
}

void Homes::release(std::size_t group, bool changed) {
  if (resident(group)) return;
  Staging* staging = find(group);
  expects(staging != nullptr && staging->in_use, "optimizer states: released without acquire");
  staging->in_use = false;
  if (!changed) return;
  Home& home = homes_[group];
  const HostBytes memory = staging->memory.first(layout_.sub_groups()[group].bytes);
  staging->writing = swap_->write(home.extent, memory, ++home.version);
}

void Homes::read_first() {
  if (swap_) read_after(resident_ == 0 ? homes_.size() - 1 : 0, kAhead);
}

void Homes::finish_writes() {
  for (Staging& staging : staging_) {
    if (staging.writing) std::exchange(staging.writing, nullptr)->finish();
  }
}

Bytes Homes::nvme_bytes() const {
  return swap_ ? swap_->stripe().bytes() : 0;
}

std::string_view Homes::io_backend() const {
  return swap_ ? std::string_view(swap_->backend()) : "";
}

}  // namespace ballast::offload
