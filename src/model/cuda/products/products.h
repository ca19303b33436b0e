#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/cuda_libraries.h"
#include "ballast/model/kernels.h"

#include "src/device/cuda/runtime.h"
#include "src/model/compute/matrix.h"

namespace ballast::model::cuda {

/// Additional operands of a product, aligned like matrices.
struct Extras {
  const void* addend = nullptr;  ///< [m, n], added; d or another matrix with the layout of d
  const void* bias = nullptr;    ///< [n], in the type of a and d, added to every row
};

/// Enqueues d = a * b (+ addend) (+ bias) on Ballast's simplest kernel: fp32 arithmetic without
/// tensor cores, asynchronous copies or a library. Arguments as for Products::multiply(), but
/// matrices may have any alignment. A sum of k terms is the sum of its parts of 16 terms in
/// ascending order, so bits depend on nothing else. The result is rounded once.
cudaError_t plain_product(cudaStream_t stream, const Extents& extents, const Matrix& a,
                          const Matrix& b, const Matrix& d, const void* addend, const void* bias);

/// Returns `matrix` from element (row, column) on.
inline Matrix from_element(const Matrix& matrix, std::size_t row, std::size_t column) {
  const std::size_t elements = row * matrix.row_step + column * matrix.column_step;
  Matrix part = matrix;
  part.data = static_cast<const std::byte*>(matrix.data) + elements * size_of(matrix.type);
  return part;
}

/// Returns the multiple of 8 at which a product is cut along `extent`, or `extent` if it is not.
constexpr std::size_t whole_eights(std::size_t extent) {
  constexpr std::size_t kLeast = 64;  // a smaller product is not worth a second launch
  return extent >= kLeast ? extent / 8 * 8 : extent;
}

/// Computes d = a * b, or d += a * b with `adds`, by calls of multiply(extents, a, b, d, adds) for
/// parts: an extent of 16-bit matrices along which elements follow each other is cut before its
/// remainder by 8. cuBLASLt's fast kernels load 8 elements at once and exist only for whole eights:
/// on an H200 a product with 50257 columns takes four times as long as one with 50256. Matrices as
/// for Products. Where the summed extent is cut, d is fp32, because the second part adds to it.
template <class Multiply>
void in_whole_eights(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& d,
                     bool adds, const Multiply& multiply) {
  const auto whole = [&](std::size_t extent, bool in_sequence) {
    return a.type != DType::f32 && in_sequence ? whole_eights(extent) : extent;
  };
  Extents first = extents;
  Extents rest = extents;
  if (const std::size_t n = whole(extents.n, true); n < extents.n) {
    first.n = n;
    rest.n -= n;
    in_whole_eights(first, a, b, d, adds, multiply);
    multiply(rest, a, from_element(b, 0, n), from_element(d, 0, n), adds);
  } else if (const std::size_t m = whole(extents.m, a.row_step == 1); m < extents.m) {
    first.m = m;
    rest.m -= m;
    in_whole_eights(first, a, b, d, adds, multiply);
    multiply(rest, from_element(a, m, 0), b, from_element(d, m, 0), adds);
  } else if (const std::size_t k = whole(extents.k, a.column_step == 1 || b.row_step == 1);
             k < extents.k && d.type == DType::f32) {
    first.k = k;
    rest.k -= k;
    multiply(first, a, b, d, adds);
    multiply(rest, from_element(a, 0, k), from_element(b, k, 0), d, true);
  } else {
    multiply(extents, a, b, d, adds);
  }
}

/// Returns the index of the fastest of `count` ways to do the same work on `stream`, the first one
/// on a tie; empty if none can be used. `enqueue(i)` enqueues way i, or returns false without
/// enqueuing anything. The ways take turns, and the shortest time of each counts. Waits for the
/// stream. Throws Error(device), and exceptions of `enqueue`.
std::optional<std::size_t> fastest_way(cudaStream_t stream, std::size_t count,
                                       const std::function<bool(std::size_t)>& enqueue);

/// Temporary device memory outside the budget.
using TrialMemory = std::unique_ptr<void, device::CudaEnd<cudaFree>>;
/// Allocates the memory, or returns null if there is not enough.
TrialMemory take_trial_memory(Bytes bytes);

/// Returns the name of the calling thread's current GPU. Throws Error(device).
std::string current_gpu();

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
