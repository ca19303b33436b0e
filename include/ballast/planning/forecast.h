#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/memory/budget.h"
#include "ballast/planning/planner.h"
#include "ballast/schedule/rates.h"

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

/// From how many tokens per step on a part of the machine is hidden behind the computation (T*).
struct HidingPoint {
  std::string what;  ///< "NVMe", "update", "link", "network"
  double tokens = 0.0;
};

/// What `ballast plan` says of a run before it is run.
struct Forecast {
  schedule::Rates rates;
  Decision decision;
  double tokens_per_second = 0.0;
  Bytes nvme_bytes_written = 0;     ///< per step and rank
  std::optional<Wear> wear;         ///< nothing when nothing is written to NVMe
  std::vector<HidingPoint> hiding;  ///< of the parts in use, the largest first
  std::vector<Variant> improvements;

  /// Below T* of some part the run is bound by a bandwidth, above all by compute (an MFU run).
  [[nodiscard]] bool bandwidth_run() const;
};

/// Decides what `config` leaves open and predicts the run on a machine of `rates`. `world` ranks
/// share the batch; everything but tokens is per rank. Budgets that the config leaves open are
/// those of the rates, or of this machine when the rates do not say. Throws like decide(),
/// and Error(memory) when NVMe has too little room.
Forecast make_forecast(const config::Config& config, const schedule::Rates& rates,
                       std::uint32_t world = 1);

/// The budgets of a run of `config`: its own, else those of `rates`, else this machine's.
memory::Budgets budgets_of(const config::Config& config, const schedule::Rates& rates);

/// For people: lines of at most 80 columns.
std::vector<std::string> describe(const Forecast& forecast);

/// For scripts: an object, indented. Seconds, bytes; `ledger` is a list of `tier`, `kind`, `bytes`.
std::string to_json(const Forecast& forecast);

}  // namespace ballast::planning
