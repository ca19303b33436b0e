#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ballast::model {

/// Difference of values from reference values, relative to the root mean square of the reference.
struct Difference {
  double mean = 0.0;  ///< root mean square
  double most = 0.0;  ///< maximum
  bool finite = true;
};

/// Adds up a Difference.
class DifferenceSum {
 public:
  void add(double value, double reference);
  [[nodiscard]] Difference result() const;

 private:
  double squares_ = 0.0;
  double errors_ = 0.0;
  double most_ = 0.0;
  std::size_t count_ = 0;
  bool finite_ = true;
};

/// A product of cuBLASLt compared with the plain kernel (KernelSet::plain).
struct ProductCheck {
  std::string product;  ///< "[64, 4096, 1024] of bf16, ..."
  Difference difference;
  bool wide = false;      ///< the result is fp32
  bool compared = false;  ///< false: there was no device memory for it
};

/// Calls `work` and checks the first product of each shape that the CUDA device computes for this
/// thread meanwhile: its first and its last 64 rows, which are computed once more. Takes device
/// memory for them in addition to ballast.device_bytes. Empty on the host device.
std::vector<ProductCheck> check_products(const std::function<void()>& work);

}  // namespace ballast::model
