#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <cuda_runtime_api.h>

#include "ballast/model/product_check.h"

#include "src/model/compute/matrix.h"
#include "src/model/cuda/products/extras.h"
#include "src/model/cuda/products/trials.h"

namespace ballast::model::cuda {

/// The checks of a thread during check_products().
class ProductChecks {
 public:
  /// Returns null outside of check_products().
  static ProductChecks* of_this_thread();

  /// Rows of a product that the plain kernel computes.
  struct Rows {
    std::size_t first = 0;
    std::size_t count = 0;
    TrialMemory expected;  ///< [count, n] in the type of the result, or null
  };
  /// Computes some rows of a product that follows, unless its shape was seen before.
  std::vector<Rows> expect(cudaStream_t stream, const Extents& extents, const Matrix& a,
                           const Matrix& b, const Matrix& d, const Extras& extras);
  /// Compares the result of the product that expect() preceded. `name`: for the report.
  void compare(cudaStream_t stream, const Extents& extents, const Matrix& d,
               const std::vector<Rows>& rows, std::string name);

  [[nodiscard]] const std::vector<ProductCheck>& all() const { return all_; }

 private:
  std::unordered_set<ProductKey, ProductKeyHash> seen_;
  std::vector<ProductCheck> all_;
};

}  // namespace ballast::model::cuda
