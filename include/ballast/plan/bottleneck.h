#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// The resource that bounds a step, predicted or measured. All texts about it are made from this.
struct Bottleneck {
  Lane lane = Lane::compute;   ///< the busiest one
  double share = 0.0;          ///< share of the time in which it is busy
  std::optional<Lane> second;  ///< the next busiest; empty if no other lane is used
  double second_share = 0.0;
  double compute = 0.0;  ///< share of the time in which the device computes

  /// Returns whether `lane` is busy for at least nine tenths of the time.
  [[nodiscard]] bool bounds() const;
  /// Returns whether that lane is compute, so that transfers and updates are hidden.
  [[nodiscard]] bool bound_by_compute() const { return bounds() && lane == Lane::compute; }
};

/// Finds the bottleneck of work that took `seconds` (above 0), in which each lane was busy for
/// `busy_seconds`.
Bottleneck find_bottleneck(const std::array<double, kLaneCount>& busy_seconds, double seconds);

/// Returns the resource that a lane uses: "compute", "update", "link", "NVMe", "network"
/// or "copies between devices".
std::string_view resource_of(Lane lane) noexcept;

/// Completes the sentence "the run is": "bound by compute (98% of the time): transfers are hidden".
std::string describe(const Bottleneck& bottleneck);

}  // namespace ballast::plan
