#pragma once

#include <algorithm>

namespace ballast::train {

/// A measured peak rate. Work that is faster proves that other work slowed the measurement, and
/// raises the peak, so that no share is above 1.
class ProvenPeak {
 public:
  explicit ProvenPeak(double measured) : peak_(measured) {}

  /// Share of `rate` in the peak; 0 if either is unknown (0).
  double share_of(double rate) {
    if (peak_ <= 0.0 || !(rate > 0.0)) return 0.0;
    peak_ = std::max(peak_, rate);
    return rate / peak_;
  }
  [[nodiscard]] double value() const { return peak_; }

 private:
  double peak_;
};

}  // namespace ballast::train
