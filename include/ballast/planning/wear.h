#pragma once

#include <optional>
#include <span>
#include <string>

#include "ballast/core/units.h"

namespace ballast::planning {

/// Endurance of a drive of which nothing is known, in bytes written: common for one of 1 TB.
inline constexpr double kRatedBytes = 600e12;

/// What writing at a run's pace does to its drives.
struct Wear {
  double terabytes_per_day = 0.0;    ///< 10^12 bytes, all drives together
  double days = 0.0;                 ///< until the drive that gets most is at its rating
  double rated_bytes = kRatedBytes;  ///< that rating, in bytes written
};

/// The pace of `written` bytes (per path, each taken for a drive of that rating) in `seconds`.
/// Nothing when too little is known: no bytes or no time.
std::optional<Wear> estimate_wear(std::span<const Bytes> written, double seconds,
                                  double rated_bytes = kRatedBytes);

/// "3.1 TB a day at this pace: a drive rated 600 TBW lasts 190 days".
std::string describe(const Wear& wear);

}  // namespace ballast::planning
