#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/rates.h"
#include "ballast/planner/planner.h"

namespace ballast::setup {

/// Assumed endurance of a drive in bytes written, typical for 1 TB.
inline constexpr double kRatedBytes = 600e12;

/// Drive wear at a run's write rate.
struct Wear {
  double terabytes_per_day = 0.0;  ///< 10^12 bytes, for all drives of a machine together
  double days = 0.0;  ///< time until the most written drive reaches its rated endurance
  double rated_bytes = kRatedBytes;  ///< rated endurance, in bytes written
};

/// Estimates the wear from writing `written` bytes (per path, one drive each) in `seconds`. Empty
/// if no bytes were written or no time passed.
std::optional<Wear> estimate_wear(std::span<const Bytes> written, double seconds,
                                  double rated_bytes = kRatedBytes);

/// Returns "3.1 TB a day at this pace: a drive rated 600 TBW lasts 190 days".
std::string describe(const Wear& wear);

/// Returns "3.1 TB a day to NVMe, a drive lasts 190 days", or "nothing is written to NVMe".
std::string describe_writes(const Wear& wear);

/// T*: tokens per step from which computation hides the time of one resource, in each pass of the
/// step.
struct HidingPoint {
  std::string what;  ///< "NVMe", "update", "link", "network"
  double tokens = 0.0;
};

/// Returns the points of all resources that a step of `blueprint` uses, largest first. The work of
/// a pass must be hidden by the computation of this pass: gated updates by the forward pass, others
/// by the backward pass. `prediction`: for the same blueprint and rates.
std::vector<HidingPoint> find_hiding_points(const engine::Blueprint& blueprint,
                                            const plan::Prediction& prediction,
                                            const plan::Rates& rates);

/// The prediction of a run that `ballast plan` prints.
/// A part of the imported folder that the model does not use and that passes through to the export.
struct PassingShare {
  std::string part;  ///< "vision"
  Elems parameters = 0;
  Bytes bytes = 0;
};

struct Forecast {
  plan::Rates rates;
  config::Config config;  ///< with every "auto" decided
  planner::Decision decision;
  double tokens_per_second = 0.0;
  Bytes nvme_bytes_written = 0;     ///< per step and rank
  std::optional<Wear> wear;         ///< empty if nothing is written to NVMe
  std::vector<HidingPoint> hiding;  ///< for the resources in use, largest first
  std::vector<planner::Improvement> improvements;
  std::vector<PassingShare> passing;  ///< set by the caller, which knows the folder

  /// Returns whether anything but compute bounds the step (plan::find_bottleneck()).
  [[nodiscard]] bool bandwidth_run() const;
};

/// Decides every "auto" of `config` and predicts the run on a machine with `rates`. `world` ranks
/// share the batch; all results but tokens are per rank. Budgets: see budgets_of(). Throws like
/// decide(), and Error(memory) if NVMe has too little room. `interrupted` (may be null) stops it
/// with Error(interrupted).
Forecast make_forecast(const config::Config& config, const plan::Rates& rates,
                       std::uint32_t world = 1, const std::atomic<bool>* interrupted = nullptr);

/// Returns the budgets of a run of `config` with `world` ranks: its own, otherwise those of
/// `rates`, otherwise this machine's. Where rates are those of a GPU, the memory of channels
/// between ranks is deducted.
memory::Budgets budgets_of(const config::Config& config, const plan::Rates& rates,
                           std::uint32_t world);

/// Returns the request to plan `config` on a machine with `rates` (may be empty).
planner::PlanRequest request_for(const config::Config& config, const plan::Rates& rates,
                                 std::uint32_t world, const std::atomic<bool>* interrupted);

/// Returns text for the console, in lines of at most 80 columns.
std::vector<std::string> describe(const Forecast& forecast);

/// Returns an indented JSON object in seconds and bytes. `ledger` is a list of `tier`, `kind`,
/// `bytes`.
std::string to_json(const Forecast& forecast);

}  // namespace ballast::setup
