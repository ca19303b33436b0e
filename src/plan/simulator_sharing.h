#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"

namespace ballast::plan {

constexpr std::size_t index(Lane lane) {
  return static_cast<std::size_t>(lane);
}

/// One bit per lane of each device, by lane_number().
using LaneSet = std::uint64_t;
static_assert(lane_count(kMaxDevices) <= 64);
inline constexpr LaneSet lane_bit(std::size_t lane) {
  return LaneSet{1} << lane;
}

/// Speed of each lane relative to running alone, by lane_number(); 0 for an idle lane.
using Speeds = std::span<const double>;

/// The slowdown of lanes that work at the same time. A lane's use of a resource does not depend on
/// the operation, so the speeds depend only on the set of active lanes. Devices share the disks,
/// the memory and the cores of the host. Each has its own link, and its own lines to other ranks.
class Sharing {
 public:
  Sharing(const Rates& rates, std::uint32_t devices);

  /// Valid until the next call.
  [[nodiscard]] Speeds speeds(LaneSet working);

  /// Total time for which the lanes of one resource occupy it.
  struct Demand {
    Lane lane = Lane::compute;  ///< the largest user
    double seconds = 0.0;
  };
  /// Returns the demands of a step in which each lane works for `work` seconds at full speed, by
  /// lane_number(). They are lower bounds.
  [[nodiscard]] std::vector<Demand> demands(std::span<const double> work) const;

 private:
  /// The threads of a lane, and the part of a core that each can use.
  struct Threads {
    double count = 0.0;
    double each = 0.0;
  };

  void set_threads(const Rates& rates);
  void set_disk(const Rates& rates);
  void set_memory(const Rates& rates);
  /// Writes the speeds.
  void share(LaneSet working, std::span<double> speeds) const;
  [[nodiscard]] const Threads& threads_of(std::size_t number) const {
    return threads_[index(lane_at(number).lane)];
  }
  [[nodiscard]] double traffic_of(std::size_t number) const {
    return traffic_[index(lane_at(number).lane)];
  }
  [[nodiscard]] double core_share(LaneSet working) const;
  [[nodiscard]] double team_speed(LaneSet working, std::size_t team) const;
  /// Speed of `lane` as measured during the other work.
  [[nodiscard]] double measured_speed(LaneSet working, Lane lane) const;
  /// Slows the lanes that use host memory down, if their speeds exceed the speed of the memory.
  void share_memory(std::span<double> speeds) const;

  std::uint32_t devices_;
  std::size_t lanes_;     ///< number, on all devices
  double cores_ = 0.0;    ///< 0: not shared
  bool passes_by_host_;   ///< copies between devices use the links
  LaneSet computes_ = 0;  ///< compute lanes
  LaneSet copies_ = 0;    ///< lanes that copy from or to a device
  std::array<Threads, kLaneCount> threads_{};
  // Measured speeds during other work, see Rates.
  double compute_beside_copy_ = 1.0;
  double compute_beside_io_ = 1.0;
  double update_beside_io_ = 1.0;
  double io_beside_compute_ = 1.0;
  double io_beside_update_ = 1.0;
  /// Bytes per second of host memory that a lane at full speed reads and writes.
  std::array<double, kLaneCount> traffic_{};
  double memory_ = 0.0;         ///< bytes per second of host memory; 0: not shared
  double read_speed_ = 1.0;     ///< speed during a write
  double write_speed_ = 1.0;    ///< speed during a read
  std::vector<double> table_;   ///< with one device: speeds for each set of lanes
  std::vector<double> speeds_;  ///< with several: result of the last call of speeds()
};

}  // namespace ballast::plan
