#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

namespace ballast::model::cuda {

template <class T>
inline constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : DType::bf16;

/// A matrix in device memory, aligned to 16 bytes: element (r, c) is at r * row_step + c *
/// column_step (elements); one of the two steps is 1, the other a multiple of 8.
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

/// Extents of d[m, n] = a[m, k] * b[k, n].
struct Extents {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};

/// What a product does besides. Aligned like matrices.
struct Extras {
  const void* addend = nullptr;  ///< [m, n] laid out like d: added; d itself, or another matrix
  const void* bias = nullptr;    ///< [n] of a's type, which then is d's too: added to every row
};

/// Matrix products through cuBLASLt, with fp32 accumulation; fp32 matrices are multiplied in fp32,
/// not TF32. The algorithm is chosen once per shape, among those whose sums have a fixed order, so
/// that equal calls give equal bits on GPUs of one model. Calls go to one stream at a time, for
/// there is one workspace, and from threads whose current device is the stream's. The library is
/// loaded when the first object is made. Errors: Error(device).
class Products {
 public:
  /// Bytes of device memory that set_workspace() takes.
  static constexpr Bytes kWorkspace = 32 * kMiB;

  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// Aligned to 256 bytes.
  void set_workspace(void* workspace);

  /// d = a * b (+ addend) (+ bias), rounded once. a and b have one type; d has it too, or is fp32.
  /// d's column_step is 1; k is not 0.
  void multiply(cudaStream_t stream, const Extents& extents, const Matrix& a, const Matrix& b,
                const Matrix& d, const Extras& extras = {});

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

/// Empty when cuBLASLt can be loaded; else the reason, one line.
std::string_view products_refusal();

}  // namespace ballast::model::cuda
