#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "src/model/compute/matrix.h"

namespace ballast::model::host {

/// Implements Compute::arithmetic() for kernels and products on `threads` threads.
std::string describe_arithmetic(std::size_t threads);

/// Returns whether bf16_products.h multiplies bf16 matrices: on CPUs with AVX-512 bf16 but without
/// AMX, which is faster. DNNL_MAX_CPU_ISA can hide either.
bool has_own_bf16_products();

/// Matrix products with fp32 accumulation: oneDNN's, and own ones (bf16_products.h) for bf16 on
/// CPUs with AVX-512 bf16, apart from weight gradients. oneDNN's primitives are made once per
/// shape, for the caller's number of threads. If oneDNN has no bf16 products for the CPU (below
/// AVX-512), bf16 matrices are first widened to fp32 copies. fp16 matrices always are, because
/// oneDNN has fp16 products only for AVX512-FP16. On CPUs with AVX-512 the bits of a product are
/// the same for every number of threads. Errors: Error(device).
class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// c = a * b (+ bias per column, of a's type) (+ c). `c` is written; its column_step is 1.
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c = false, const void* bias = nullptr);
  /// Makes the primitive for such a product. Only strides and types of the matrices matter.
  void prepare(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
               bool add_to_c = false);
  /// Runs multiply() for a prepared product. Threads may call it concurrently.
  void multiply_prepared(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                         bool add_to_c = false) const;

 private:
  void multiply_tiles(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                      bool add_to_c, const void* bias);

  struct Cache;
  std::unique_ptr<Cache> cache_;
};

}  // namespace ballast::model::host
