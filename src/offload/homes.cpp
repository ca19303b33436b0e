#include "src/offload/homes.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

/// One buffer is updated, two are read, two are written.
constexpr std::size_t kStaging = 5;
constexpr std::size_t kAhead = 2;

Bytes largest_group(const OffloadLayout& layout) {
  Bytes largest = 0;
  for (const OffloadSubGroup& group : layout.sub_groups()) largest = std::max(largest, group.bytes);
  return largest;
}

/// Takes pieces of memory, beginning at its start.
class Pieces {
 public:
  explicit Pieces(HostBytes memory) : free_(memory) {}
  HostBytes take(Bytes bytes) {
    const HostBytes taken = free_.first(bytes);
    free_ = free_.subspan(bytes);
    return taken;
  }

 private:
  HostBytes free_;
};

}  // namespace

StateHomes::StateHomes(const OffloadLayout& layout, const cpu_adam::Updater& updater,
                       StatePlace place)
    : layout_(layout), updater_(updater), place_(std::move(place)) {
  grow(layout);
}

StateHomes::Growth StateHomes::plan_growth(const OffloadLayout& grown) const {
  const auto groups = std::span(grown.sub_groups()).subspan(homes_.size());
  Growth growth;
  growth.resident.assign(groups.size(), true);
  for (const OffloadSubGroup& group : groups) growth.resident_bytes += group.bytes;
  if (!place_.nvme || groups.empty()) return growth;
  const Bytes before = resident_bytes_ + staging_.size() * largest_;
  if (place_.host_bytes && before + growth.resident_bytes <= *place_.host_bytes) return growth;
  growth.largest = std::max(largest_, largest_group(grown));
  growth.buffers = std::min(kStaging, grown.sub_groups().size());
  const Bytes taken = resident_bytes_ + growth.buffers * growth.largest;
  const Bytes budget = place_.host_bytes.value_or(taken);
  if (budget < taken) {
    throw Error(ErrorCategory::config,
                fmt::format("host_bytes: {} are too few; the buffers between memory and NVMe, and "
                            "the states that are already in memory, need {}",
                            format_bytes(budget), format_bytes(taken)));
  }
  Bytes left = budget - taken;
  growth.resident_bytes = 0;
  bool fits = true;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    fits = fits && groups[i].bytes <= left;
    growth.resident[i] = fits;
    if (fits) {
      left -= groups[i].bytes;
      growth.resident_bytes += groups[i].bytes;
    } else {
      growth.extents.push_back(groups[i].bytes);
    }
  }
  return growth;
}

bool StateHomes::needs_other_staging(const Growth& growth) const {
  return growth.buffers > staging_.size() || growth.largest > largest_;
}

void StateHomes::grow(const OffloadLayout& grown) {
  const Growth growth = plan_growth(grown);
  std::optional<state::SwapPlan> plan;
  if (!growth.extents.empty()) plan = state::plan_swap(*place_.nvme, growth.extents);
  Mapping memory = updater_.allocate(growth.resident_bytes);
  Mapping staging_memory;
  std::vector<Staging> staging;
  if (!growth.extents.empty() && needs_other_staging(growth)) {
    staging_memory = updater_.allocate(growth.buffers * growth.largest);
    Pieces pieces(staging_memory.bytes());
    staging.resize(growth.buffers);
    for (Staging& one : staging) one.memory = pieces.take(growth.largest);
  }
  std::unique_ptr<state::SwapSpace> space;
  if (plan) {
    std::vector<HostBytes> registered;
    for (const Staging& one : staging.empty() ? staging_ : staging) {
      registered.push_back(one.memory);
    }
    space = std::make_unique<state::SwapSpace>(*plan, registered);
  }
  // Writes change the versions of homes.
  if (!staging.empty()) finish_transfers();
  std::vector<Home> homes = homes_;
  std::vector<std::size_t> swapped = swapped_;
  Pieces pieces(memory.bytes());
  std::size_t extent = 0;
  for (const bool resident : growth.resident) {
    const Bytes bytes = grown.sub_groups()[homes.size()].bytes;
    if (resident) {
      homes.push_back({.memory = pieces.take(bytes)});
    } else {
      swapped.push_back(homes.size());
      homes.push_back({.space = space.get(), .extent = extent++});
    }
  }
  memory_.reserve(memory_.size() + 1);
  staging_memory_.reserve(staging_memory_.size() + 1);
  spaces_.reserve(spaces_.size() + 1);
  // Nothing throws from here on.
  homes_ = std::move(homes);
  swapped_ = std::move(swapped);
  if (growth.resident_bytes > 0) memory_.push_back(std::move(memory));
  resident_bytes_ += growth.resident_bytes;
  if (space) spaces_.push_back(std::move(space));
  if (staging.empty()) return;
  staging_ = std::move(staging);
  staging_memory_.push_back(std::move(staging_memory));
  largest_ = growth.largest;
  turn_ = 0;
}

StateHomes::~StateHomes() {
  // Transfers wait for their requests.
  staging_.clear();
}

StateHomes::Staging* StateHomes::find(std::size_t group) {
  const auto found = std::find_if(staging_.begin(), staging_.end(),
                                  [group](const Staging& s) { return s.group == group; });
  return found == staging_.end() ? nullptr : &*found;
}

StateHomes::Staging& StateHomes::take_staging() {
  while (staging_[turn_ % staging_.size()].in_use) ++turn_;
  Staging& staging = staging_[turn_++ % staging_.size()];
  if (staging.changed) start_write(staging);
  staging.group.reset();
  if (staging.reading) std::exchange(staging.reading, nullptr)->finish();
  if (staging.writing) std::exchange(staging.writing, nullptr)->finish();
  return staging;
}

StateHomes::Staging& StateHomes::start_read(std::size_t group, bool ahead) {
  Staging& staging = take_staging();
  const Home& home = homes_[group];
  const HostBytes memory = staging.memory.first(layout_.sub_groups()[group].bytes);
  if (home.version == 0) {
    std::memset(memory.data(), 0, memory.size());
  } else {
    staging.reading = home.space->read(home.extent, memory, home.version, ahead);
  }
  staging.group = group;
  return staging;
}

void StateHomes::start_write(Staging& staging) {
  Home& home = homes_[*staging.group];
  const HostBytes memory = staging.memory.first(layout_.sub_groups()[*staging.group].bytes);
  staging.changed = false;
  staging.writing = home.space->write(home.extent, memory, ++home.version);
}

void StateHomes::start_writes(std::optional<std::size_t> except) {
  for (Staging& staging : staging_) {
    if (staging.changed && !staging.in_use && staging.group != except) start_write(staging);
  }
}

void StateHomes::read_from(std::size_t position) {
  const std::size_t count = std::min({kAhead, swapped_.size(), staging_.size() - 1});
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t next = swapped_[(position + i) % swapped_.size()];
    if (find(next) == nullptr) start_read(next, true);
  }
}

HostBytes StateHomes::acquire(std::size_t group, bool ahead) {
  if (resident(group)) {
    // When a pass begins, the disk reads while resident sub-groups are updated.
    if (ahead && group == 0) read_first();
    return homes_[group].memory;
  }
  start_writes(group);
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
  // The caller may change data that is still being written.
  if (staging->writing) std::exchange(staging->writing, nullptr)->finish();
  if (ahead) {
    const auto after = std::ranges::upper_bound(swapped_, group);
    read_from(static_cast<std::size_t>(after - swapped_.begin()));
  }
  return staging->memory.first(layout_.sub_groups()[group].bytes);
}

void StateHomes::release(std::size_t group, WriteBack write) {
  if (resident(group)) return;
  Staging* staging = find(group);
  expects(staging != nullptr && staging->in_use, "optimizer states: released without acquire");
  staging->in_use = false;
  staging->changed = staging->changed || write != WriteBack::none;
  if (write == WriteBack::now) start_write(*staging);
}

void StateHomes::read_first() {
  if (!swapped_.empty()) read_from(0);
}

void StateHomes::finish_writes() {
  start_writes(std::nullopt);
  for (Staging& staging : staging_) {
    if (staging.writing) std::exchange(staging.writing, nullptr)->finish();
  }
}

void StateHomes::finish_transfers() {
  finish_writes();
  for (Staging& staging : staging_) {
    if (staging.reading) std::exchange(staging.reading, nullptr)->finish();
  }
}

Bytes StateHomes::host_bytes() const {
  Bytes sum = 0;
  for (const Mapping& memory : memory_) sum += memory.bytes().size();
  for (const Mapping& memory : staging_memory_) sum += memory.bytes().size();
  return sum;
}

Bytes StateHomes::nvme_bytes() const {
  Bytes sum = 0;
  for (const auto& space : spaces_) sum += space->stripe().bytes();
  return sum;
}

std::string_view StateHomes::io_backend() const {
  return spaces_.empty() ? std::string_view() : spaces_.front()->backend();
}

}  // namespace ballast::offload
