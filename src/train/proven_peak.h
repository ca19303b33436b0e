#pragma once

#include <algorithm>

namespace ballast::train {

/// A measured peak rate. Faster work proves that the measurement was disturbed, and raises the
/// peak, so that no share exceeds 1.
class ProvenPeak {
 public:
  explicit ProvenPeak(double measured) : peak_(measured) {}

  /// Returns `rate` as a share of the peak; 0 if either is unknown (0).
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
