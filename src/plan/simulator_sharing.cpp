#include "src/plan/simulator_sharing.h"

#include <algorithm>
#include <cmath>

namespace ballast::plan {
namespace {

constexpr LaneSet set_of(Lane a, Lane b, std::uint8_t device = 0) {
  return lane_bit(lane_number(a, device)) | lane_bit(lane_number(b, device));
}

constexpr LaneSet kDisk = set_of(Lane::fetch, Lane::writeback);

/// Threads that use at least this fraction of a core count as using a whole core.
constexpr double kWhole = 0.75;

bool contains(LaneSet set, std::size_t lane) {
  return (set & lane_bit(lane)) != 0;
}

/// Lets two lanes share a resource equally if both work.
void halve(LaneSet two, LaneSet working, std::span<double> speeds) {
  if ((working & two) != two) return;
  for (std::size_t number = 0; number < speeds.size(); ++number) {
    if (contains(two, number)) speeds[number] = std::min(speeds[number], 0.5);
  }
}

}  // namespace

Sharing::Sharing(const Rates& rates, std::uint32_t devices)
    : devices_(devices),
      lanes_(lane_count(devices)),
      cores_(rates.shared_cores),
      passes_by_host_(devices > 1 && rates.peer_per_second == 0.0) {
  set_threads(rates);
  set_disk(rates);
  set_memory(rates);
  for (std::uint8_t d = 0; d < devices; ++d) {
    computes_ |= lane_bit(lane_number(Lane::compute, d));
    copies_ |= set_of(Lane::upload, Lane::offload, d);
    if (devices > 1) copies_ |= lane_bit(lane_number(Lane::peer, d));
  }
  speeds_.resize(lanes_);
  if (devices > 1) return;
  table_.resize(lanes_ << lanes_);
  for (LaneSet working = 0; working < LaneSet{1} << lanes_; ++working) {
    share(working, std::span(table_).subspan(working * lanes_, lanes_));
  }
}

Speeds Sharing::speeds(LaneSet working) {
  if (!table_.empty()) return std::span(table_).subspan(working * lanes_, lanes_);
  share(working, speeds_);
  return speeds_;
}

/// A lane alone gets everything that it can use, because its rate was measured alone.
void Sharing::set_threads(const Rates& rates) {
  if (rates.shared_cores == 0) return;
  const auto set = [this](Lane lane, double count, double busy) {
    if (count > 0.0) threads_[index(lane)] = {count, std::min(busy, cores_) / count};
  };
  const auto speed = [](double measured) { return measured > 0.0 ? measured : 1.0; };
  compute_beside_copy_ = speed(rates.compute_beside_copy);
  compute_beside_io_ = speed(rates.compute_beside_io);
  update_beside_io_ = speed(rates.update_beside_io);
  io_beside_compute_ = speed(rates.io_beside_compute);
  io_beside_update_ = speed(rates.io_beside_update);
  set(Lane::compute, rates.compute_threads, rates.compute_threads);
  set(Lane::update, rates.update_threads, rates.update_threads);
  for (const Lane lane : {Lane::upload, Lane::offload, Lane::gather, Lane::reduce, Lane::peer}) {
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

/// Rates were measured alone, so one lane can have all of the memory's speed.
void Sharing::set_memory(const Rates& rates) {
  if (rates.host_memory_per_second == 0.0) return;
  traffic_[index(Lane::update)] = rates.update_per_second;
  traffic_[index(Lane::upload)] = rates.upload_per_second;
  traffic_[index(Lane::offload)] = rates.offload_per_second;
  traffic_[index(Lane::fetch)] = rates.read_per_second;
  traffic_[index(Lane::writeback)] = rates.write_per_second;
  memory_ =
      std::max(rates.host_memory_per_second, *std::max_element(traffic_.begin(), traffic_.end()));
  if (!passes_by_host_) return;
  const double copied = std::min(rates.upload_per_second, rates.offload_per_second);
  traffic_[index(Lane::peer)] = 2.0 * copied;
}

/// Returns the largest fraction of a core that a thread gets. Cores are shared fairly, like by the
/// kernel: threads that need less leave the rest to the others.
double Sharing::core_share(LaneSet working) const {
  std::vector<Threads> wanting;
  double wanted = 0.0;
  double count = 0.0;
  for (std::size_t number = 0; number < lanes_; ++number) {
    const Threads& threads = threads_of(number);
    if (!contains(working, number) || threads.count == 0.0) continue;
    wanting.push_back(threads);
    wanted += threads.count * threads.each;
    count += threads.count;
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
double Sharing::team_speed(LaneSet working, std::size_t team) const {
  if (cores_ == 0.0) return 1.0;
  double others = 0.0;
  for (std::size_t number = 0; number < lanes_; ++number) {
    const bool counts = contains(working, number) && number != team;
    if (counts && threads_of(number).each >= kWhole) others += threads_of(number).count;
  }
  const double idle = std::max(0.0, cores_ - threads_[index(Lane::compute)].count);
  return 1.0 / (1.0 + std::ceil(std::max(0.0, others - idle) / cores_));
}

/// Copies and transfers also use memory bandwidth and caches.
double Sharing::measured_speed(LaneSet working, Lane lane) const {
  const auto during = [working](LaneSet others, double speed) {
    return (working & others) != 0 ? speed : 1.0;
  };
  switch (lane) {
    case Lane::compute:
      return during(copies_, compute_beside_copy_) * during(kDisk, compute_beside_io_);
    case Lane::update:
      return during(kDisk, update_beside_io_);
    case Lane::fetch:
    case Lane::writeback:
      return std::min(during(computes_, io_beside_compute_),
                      during(lane_bit(lane_number(Lane::update, 0)), io_beside_update_));
    default:
      return 1.0;
  }
}

void Sharing::share_memory(std::span<double> speeds) const {
  if (memory_ == 0.0) return;
  double wanted = 0.0;
  for (std::size_t number = 0; number < lanes_; ++number) {
    wanted += speeds[number] * traffic_of(number);
  }
  if (wanted <= memory_) return;
  for (std::size_t number = 0; number < lanes_; ++number) {
    if (traffic_of(number) > 0.0) speeds[number] *= memory_ / wanted;
  }
}

void Sharing::share(LaneSet working, std::span<double> speeds) const {
  const double core = core_share(working);
  for (std::size_t number = 0; number < lanes_; ++number) {
    double& speed = speeds[number] = 0.0;
    if (!contains(working, number)) continue;
    speed = measured_speed(working, lane_at(number).lane);
    if (threads_of(number).each > core) speed = std::min(speed, core / threads_of(number).each);
    if (lane_at(number).lane == Lane::compute) {
      speed = std::min(speed, team_speed(working, number));
    }
    if (contains(kDisk, number) && (working & kDisk) == kDisk) {
      const bool reading = number == index(Lane::fetch);
      speed = std::min(speed, reading ? read_speed_ : write_speed_);
    }
  }
  for (std::uint8_t d = 0; d < devices_; ++d) {
    halve(set_of(Lane::gather, Lane::reduce, d), working, speeds);
    if (passes_by_host_) halve(set_of(Lane::offload, Lane::peer, d), working, speeds);
  }
  share_memory(speeds);
}

std::vector<Sharing::Demand> Sharing::demands(std::span<const double> work) const {
  const double reading = work[index(Lane::fetch)];
  const double writing = work[index(Lane::writeback)];
  const double both = std::min(reading / read_speed_, writing / write_speed_);
  const double rest = std::max(reading - both * read_speed_, writing - both * write_speed_);
  // Both run at once as far as possible, unless one after the other is faster.
  const double disk = std::min(both + rest, reading + writing);
  std::vector<Demand> found = {{reading >= writing ? Lane::fetch : Lane::writeback, disk}};
  for (std::uint8_t d = 0; d < devices_; ++d) {
    const auto add = [&](Lane one, Lane other) {
      const double first = work[lane_number(one, d)];
      const double second = work[lane_number(other, d)];
      found.push_back({first >= second ? one : other, first + second});
    };
    add(Lane::gather, Lane::reduce);
    if (passes_by_host_) add(Lane::offload, Lane::peer);
  }
  // `share(number)` is the part of the resource that a lane occupies at full speed.
  const auto add_all = [&](auto share) {
    Demand all;
    double most = 0.0;
    for (std::size_t number = 0; number < lanes_; ++number) {
      const double taken = work[number] * share(number);
      if (taken > most) all.lane = lane_at(number).lane;
      most = std::max(most, taken);
      all.seconds += taken;
    }
    found.push_back(all);
  };
  if (memory_ > 0.0) add_all([&](std::size_t number) { return traffic_of(number) / memory_; });
  if (cores_ > 0.0) {
    add_all([&](std::size_t number) {
      const Threads& threads = threads_of(number);
      return threads.count * threads.each / cores_;
    });
  }
  return found;
}

}  // namespace ballast::plan
