#include "src/plan/simulator_sharing.h"

#include <algorithm>
#include <cmath>

namespace ballast::plan {
namespace {

constexpr LaneSet set_of(Lane a, Lane b) {
  return lane_bit(index(a)) | lane_bit(index(b));
}

constexpr LaneSet kDisk = set_of(Lane::fetch, Lane::writeback);
constexpr LaneSet kLink = set_of(Lane::upload, Lane::offload);
constexpr LaneSet kNetwork = set_of(Lane::gather, Lane::reduce);

/// Threads that use at least this fraction of a core count as using a whole core.
constexpr double kWhole = 0.75;

bool contains(LaneSet set, std::size_t lane) {
  return (set & lane_bit(lane)) != 0;
}

}  // namespace

Sharing::Sharing(const Rates& rates) : cores_(rates.shared_cores) {
  set_threads(rates);
  set_disk(rates);
  table_.reserve(LaneSet{1} << kLaneCount);
  for (LaneSet working = 0; working < LaneSet{1} << kLaneCount; ++working) {
    table_.push_back(share(working));
  }
}

/// A lane alone gets everything that it can use, because its rate was measured alone.
void Sharing::set_threads(const Rates& rates) {
  if (rates.shared_cores == 0) return;
  const auto set = [this](Lane lane, double count, double busy) {
    if (count > 0.0) threads_[index(lane)] = {count, std::min(busy, cores_) / count};
  };
  const auto speed = [](double measured) { return measured > 0.0 ? measured : 1.0; };
  beside_copy_ = speed(rates.compute_beside_copy);
  beside_io_ = speed(rates.compute_beside_io);
  set(Lane::compute, rates.compute_threads, rates.compute_threads);
  set(Lane::update, rates.update_threads, rates.update_threads);
  for (const Lane lane : {Lane::upload, Lane::offload, Lane::gather, Lane::reduce}) {
    set(lane, std::ceil(rates.link_cores), rates.link_cores);
  }
  for (const Lane lane : {Lane::fetch, Lane::writeback}) {
    set(lane, std::ceil(rates.io_cores), rates.io_cores);
  }
}

/// Reading and writing get their shares, and the unused rest of the other's share.
void Sharing::set_disk(const Rates& rates) {
  const double read = rates.read_per_second;
  const double write = rates.write_per_second;
  const double mixed = rates.mixed_per_second;
  if (!(read > 0.0 && write > 0.0 && mixed > 0.0)) return;
  const double read_part = mixed * rates.mixed_read_share;
  const double write_part = mixed - read_part;
  read_speed_ = std::min(read, std::max(read_part, mixed - write)) / read;
  write_speed_ = std::min(write, std::max(write_part, mixed - read)) / write;
}

/// Returns the largest fraction of a core that a thread gets. Cores are shared fairly, like by the
/// kernel: threads that need less leave the rest to the others.
double Sharing::core_share(LaneSet working) const {
  std::vector<Threads> wanting;
  double wanted = 0.0;
  double count = 0.0;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (!contains(working, lane) || threads_[lane].count == 0.0) continue;
    wanting.push_back(threads_[lane]);
    wanted += threads_[lane].count * threads_[lane].each;
    count += threads_[lane].count;
  }
  if (wanted <= cores_) return 1.0;
  std::sort(wanting.begin(), wanting.end(),
            [](const Threads& a, const Threads& b) { return a.each < b.each; });
  double left = cores_;
  double core = 0.0;
  for (const Threads& threads : wanting) {
    core = left / count;
    if (threads.each >= core) break;
    left -= threads.count * threads.each;
    count -= threads.count;
  }
  return core;
}

/// A team of compute threads is as fast as the thread that shares its core with most others,
/// because the work is divided equally in advance.
double Sharing::team_speed(LaneSet working) const {
  if (cores_ == 0.0) return 1.0;
  double others = 0.0;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    const bool counts = contains(working, lane) && lane != index(Lane::compute);
    if (counts && threads_[lane].each >= kWhole) others += threads_[lane].count;
  }
  const double idle = std::max(0.0, cores_ - threads_[index(Lane::compute)].count);
  return 1.0 / (1.0 + std::ceil(std::max(0.0, others - idle) / cores_));
}

/// Speed of compute during copies and transfers, which also use memory bandwidth and caches.
double Sharing::measured_speed(LaneSet working) const {
  return ((working & kLink) != 0 ? beside_copy_ : 1.0) *
         ((working & kDisk) != 0 ? beside_io_ : 1.0);
}

Speeds Sharing::share(LaneSet working) const {
  const double core = core_share(working);
  Speeds speeds{};
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (!contains(working, lane)) continue;
    speeds[lane] = 1.0;
    if (threads_[lane].each > core) speeds[lane] = core / threads_[lane].each;
    if (lane == index(Lane::compute)) {
      speeds[lane] = std::min({speeds[lane], team_speed(working), measured_speed(working)});
    }
    if (contains(kDisk, lane) && (working & kDisk) == kDisk) {
      const bool reading = lane == index(Lane::fetch);
      speeds[lane] = std::min(speeds[lane], reading ? read_speed_ : write_speed_);
    }
    if (contains(kNetwork, lane) && (working & kNetwork) == kNetwork) {
      speeds[lane] = std::min(speeds[lane], 0.5);
    }
  }
  return speeds;
}

std::vector<Sharing::Demand> Sharing::demands(const std::array<double, kLaneCount>& work) const {
  const double reading = work[index(Lane::fetch)];
  const double writing = work[index(Lane::writeback)];
  const double both = std::min(reading / read_speed_, writing / write_speed_);
  const double rest = std::max(reading - both * read_speed_, writing - both * write_speed_);
  // Both run at once as far as possible, unless one after the other is faster.
  const double disk = std::min(both + rest, reading + writing);
  const double gathering = work[index(Lane::gather)];
  const double reducing = work[index(Lane::reduce)];
  std::vector<Demand> found = {
      {reading >= writing ? Lane::fetch : Lane::writeback, disk},
      {gathering >= reducing ? Lane::gather : Lane::reduce, gathering + reducing}};
  if (cores_ == 0.0) return found;
  Demand all;
  double most = 0.0;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    const double taken = work[lane] * threads_[lane].count * threads_[lane].each / cores_;
    if (taken > most) all.lane = kLanes[lane];
    most = std::max(most, taken);
    all.seconds += taken;
  }
  found.push_back(all);
  return found;
}

}  // namespace ballast::plan
