#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ballast/schedule/plan.h"
#include "ballast/schedule/rates.h"

namespace ballast::schedule {

/// One bit per lane.
using LaneSet = std::uint32_t;
inline constexpr LaneSet lane_bit(std::size_t lane) {
  return LaneSet{1} << lane;
}

/// Speeds of the lanes at work, 1 for one that gets all it can use.
using Speeds = std::array<double, kLaneCount>;

/// How lanes that work at the same time slow each other down. What a lane asks of a resource does
/// not depend on the operation, so that the speeds depend on nothing but the lanes at work.
class Sharing {
 public:
  explicit Sharing(const Rates& rates);

  /// Speeds of the lanes of `working`; of the others: 0.
  [[nodiscard]] const Speeds& speeds(LaneSet working) const { return table_[working]; }

  /// What the lanes of one resource take of it together.
  struct Demand {
    Lane lane = Lane::compute;  ///< the one that takes most
    double seconds = 0.0;
  };
  /// In a step in which each lane works for `work` seconds at full speed; no schedule is quicker.
  [[nodiscard]] std::vector<Demand> demands(const std::array<double, kLaneCount>& work) const;

 private:
  /// The threads of a lane and the part of a core that each can use.
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
  double beside_copy_ = 1.0;  ///< speed of compute with a copy at work, as measured
  double beside_io_ = 1.0;    ///< speed of compute with a transfer at work, as measured
  double read_speed_ = 1.0;   ///< with a write at work
  double write_speed_ = 1.0;  ///< with a read at work
  std::vector<Speeds> table_;
};

}  // namespace ballast::schedule
