#pragma once

#include <cstddef>
#include <memory>

#include <cuda_runtime_api.h>

#include "ballast/core/units.h"
#include "ballast/model/kernel_choice.h"
#include "ballast/model/product_choices.h"

#include "src/model/compute/matrix.h"
#include "src/model/cuda/products/extras.h"

namespace ballast::model::cuda {

/// Matrix products through cuBLASLt, with fp32 accumulation. Matrices are aligned to 16 bytes. Rows
/// should start at multiples of 16 bytes, too. If they do not (adapters of rank 4, the gate of a
/// shared expert), the library's slower algorithms for smaller alignments are used. fp32 matrices
/// are multiplied in fp32, not TF32. One algorithm is chosen per shape, among those with a fixed
/// order of summation that the library does not refuse in their first run: the library's best, or
/// with `choices` the fastest one when timed. So equal calls with equal choices give equal bits on
/// GPUs of one model. Calls must use one stream at a time, because there is one workspace, from
/// threads whose current device is the stream's. The first object loads the library. Errors:
/// Error(device). With KernelSet::plain, plain_product() computes all products, and neither the
/// library nor the workspace is used.
class Products {
 public:
  /// Bytes of device memory for set_workspace().
  static constexpr Bytes kWorkspace = 32 * kMiB;

  explicit Products(std::shared_ptr<ProductChoices> choices = nullptr,
                    KernelSet set = KernelSet::best);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  /// `workspace`: kWorkspace bytes, aligned to 256 bytes.
  void set_workspace(void* workspace);

  /// d = a * b (+ addend) (+ bias), rounded once, except that the library's kernels for Hopper
  /// round a 16-bit product before they add a 16-bit addend. a and b have the same type; d has
  /// that type or fp32. d's column_step is 1; k is not 0. With choices, the first product of a
  /// shape may take as long as a hundred products, if it is timed. If that product adds to d
  /// itself, the trials write to device memory of d's size outside ballast.device_bytes; without
  /// that memory the library's best is chosen.
  void multiply(cudaStream_t stream, const Extents& extents, const Matrix& a, const Matrix& b,
                const Matrix& d, const Extras& extras = {});

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;  ///< null for plain kernels
};

}  // namespace ballast::model::cuda
