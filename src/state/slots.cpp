#include "src/state/slots.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::state {

Slots::Slots(std::span<const Bytes> extents, std::size_t homes)
    : sizes_(extents.begin(), extents.end()),
      extents_(homes),
      in_use_(extents.size(), false),
      keepers_(extents.size(), 0) {
  expects(homes <= extents.size(), "slots: fewer extents than homes");
  std::iota(extents_.begin(), extents_.end(), 0);
  std::fill_n(in_use_.begin(), homes, true);
  for (std::size_t e = extents.size(); e-- > homes;) free_[sizes_[e]].push_back(e);
}

std::size_t Slots::extent(std::size_t home) const {
  const std::lock_guard lock(mutex_);
  return extents_.at(home);
}

std::size_t Slots::take_free(Bytes size) {
  auto& free = free_[size];
  expects(!free.empty(), "slots: checkpoints keep all extents of this size");
  const std::size_t taken = free.back();
  free.pop_back();
  in_use_[taken] = true;
  return taken;
}

std::size_t Slots::for_writing(std::size_t home) {
  const std::lock_guard lock(mutex_);
  std::size_t& extent = extents_.at(home);
  if (keepers_[extent] == 0) return extent;
  const std::size_t other = take_free(sizes_[extent]);
  in_use_[extent] = false;
  return extent = other;
}

void Slots::exchange(std::size_t home, std::size_t other) {
  const std::lock_guard lock(mutex_);
  std::swap(extents_.at(home), extents_.at(other));
}

void Slots::keep(std::uint64_t checkpoint, std::span<const std::size_t> homes) {
  const std::lock_guard lock(mutex_);
  auto& kept = kept_[checkpoint];
  expects(kept.empty(), "slots: the checkpoint keeps extents already");
  for (const std::size_t home : homes) {
    kept.push_back(extents_.at(home));
    ++keepers_[kept.back()];
  }
}

void Slots::release(std::uint64_t checkpoint) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(checkpoint);
  if (found == kept_.end()) return;
  for (const std::size_t extent : found->second) {
    if (--keepers_[extent] == 0 && !in_use_[extent]) free_[sizes_[extent]].push_back(extent);
  }
  kept_.erase(found);
}

std::vector<std::uint64_t> Slots::checkpoints() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> found;
  for (const auto& [checkpoint, extents] : kept_) found.push_back(checkpoint);
  return found;
}

void Slots::restore(std::span<const std::pair<std::size_t, std::size_t>> homes,
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

}  // namespace ballast::state
