#pragma once

#include <cstddef>
#include <memory>

#include "src/model/matrix.h"

namespace ballast::model::host {

/// Matrix products through oneDNN, with fp32 accumulation; primitives are made once per shape. A
/// primitive belongs to the number of threads of the call that made it. Where oneDNN has no bf16
/// products for the CPU (below AVX-512), bf16 matrices are widened to fp32 copies first. Errors:
/// Error(device).
class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// c = a * b (+ bias per column, of a's type) (+ c). `c` is written; its column_step is 1.
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c = false, const void* bias = nullptr);
  /// Makes the primitive for such a product. Only the steps and types of the matrices count.
  void prepare(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
               bool add_to_c = false);
  /// multiply() for a prepared product: changes nothing in this object, so threads may call it
  /// together.
  void multiply_prepared(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                         bool add_to_c = false) const;

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

}  // namespace ballast::model::host
