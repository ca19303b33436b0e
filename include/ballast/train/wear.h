#pragma once

#include <optional>
#include <span>
#include <string>

#include "ballast/core/units.h"

namespace ballast::train {

/// What writing at a run's pace does to its drives.
struct Wear {
  double terabytes_per_day = 0.0;  ///< 10^12 bytes, all drives together
  double days = 0.0;               ///< until the drive that gets most is at its rating
};

/// Endurance that the estimate is given for, in bytes written: common for a drive of 1 TB.
inline constexpr double kRatedBytes = 600e12;

/// The pace of `written` bytes (per path, each taken for a drive) in `seconds`. Nothing when too
/// little is known: no bytes or no time.
std::optional<Wear> estimate_wear(std::span<const Bytes> written, double seconds);

/// "3.1 TB a day at this pace: a drive rated 600 TBW lasts 190 days".
std::string describe(const Wear& wear);

}  // namespace ballast::train
