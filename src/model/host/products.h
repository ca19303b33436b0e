#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ballast/core/dtype.h"

namespace ballast::model::host {

template <class T>
inline constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : DType::bf16;

/// A matrix in memory: element (r, c) is at r * row_step + c * column_step (elements); one of the
/// two steps is 1.
struct Matrix {
  const void* data = nullptr;
  DType type = DType::f32;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

template <class T>
Matrix matrix(const T* data, std::size_t row_step) {
  return {data, kType<T>, row_step, 1};
}
template <class T>
Matrix transposed(const T* data, std::size_t row_step) {
  return {data, kType<T>, 1, row_step};
}

/// Extents of c[m, n] = a[m, k] * b[k, n].
struct Extents {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};

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
