#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"

namespace ballast::plan {

constexpr std::size_t index(Lane lane) {
  return static_cast<std::size_t>(lane);
}

/// One bit per lane.
using LaneSet = std::uint32_t;
inline constexpr LaneSet lane_bit(std::size_t lane) {
  return LaneSet{1} << lane;
}

/// Speed of each lane relative to running alone; 0 for an idle lane.
using Speeds = std::array<double, kLaneCount>;

/// The slowdown of lanes that work at the same time. A lane's use of a resource does not depend on
/// the operation, so the speeds depend only on the set of active lanes.
class Sharing {
 public:
  explicit Sharing(const Rates& rates);

  [[nodiscard]] const Speeds& speeds(LaneSet working) const { return table_[working]; }

  /// Total time for which the lanes of one resource occupy it.
  struct Demand {
    Lane lane = Lane::compute;  ///< the largest user
    double seconds = 0.0;
  };
  /// Returns the demands of a step in which each lane works for `work` seconds at full speed. They
  /// are lower bounds.
  [[nodiscard]] std::vector<Demand> demands(const std::array<double, kLaneCount>& work) const;

 private:
  /// The threads of a lane, and the part of a core that each can use.
  struct Threads {
    double count = 0.0;
    double each = 0.0;
  };

  void set_threads(const Rates& rates);
  void set_disk(const Rates& rates);
  [[nodiscard]] Speeds share(LaneSet working) const;
  [[nodiscard]] double core_share(LaneSet working) const;
  [[nodiscard]] double team_speed(LaneSet working) const;
  [[nodiscard]] double measured_speed(LaneSet working) const;

  double cores_ = 0.0;  ///< 0: not shared
  std::array<Threads, kLaneCount> threads_{};
  double beside_copy_ = 1.0;  ///< measured speed of compute during a copy
  double beside_io_ = 1.0;    ///< measured speed of compute during a transfer
  double read_speed_ = 1.0;   ///< speed during a write
  double write_speed_ = 1.0;  ///< speed during a read
  std::vector<Speeds> table_;
};

}  // namespace ballast::plan
