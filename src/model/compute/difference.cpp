#include <algorithm>
#include <cmath>

#include "ballast/model/product_check.h"

namespace ballast::model {

void DifferenceSum::add(double value, double reference) {
  const double error = std::abs(value - reference);
  finite_ = finite_ && std::isfinite(error);
  squares_ += reference * reference;
  errors_ += error * error;
  most_ = std::max(most_, error);
  ++count_;
}

Difference DifferenceSum::result() const {
  if (count_ == 0) return {};
  const double size = std::sqrt(squares_ / static_cast<double>(count_));
  if (size == 0.0) return {.mean = most_, .most = most_, .finite = finite_};
  return {.mean = std::sqrt(errors_ / static_cast<double>(count_)) / size,
          .most = most_ / size,
          .finite = finite_};
}

}  // namespace ballast::model
