#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/device/cuda_stream.h"

#include "src/model/compute/token_rows.h"
#include "src/model/cuda/links/links.h"
#include "src/model/cuda/work_check.h"

namespace ballast::model::cuda {

/// The operations of values that layers share besides the residual stream on the CUDA device,
/// documented at host::LinkOps. Each enqueues kernels on a stream.
template <class T>
class LinkOps {
 public:
  /// `links`: scratch memory for 2 values per token. `checks`: wait for each kernel and check it.
  LinkOps(device::CudaStream& stream, bool checks) : stream_(stream), checks_(checks) {}

  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) const {
    check(put_sums(stream_.native(), x, step, {rows, width}, adds, sums),
          "sum of the gradients of shared keys and values", {rows, width});
  }
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) const {
    check(cuda::add_sums(stream_.native(), sums, {rows, width}, x, step),
          "gradient of shared keys and values", {rows, width});
  }
  void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x, std::size_t step,
                T* y) const {
    check(cuda::mix_rows(stream_.native(), rows, how, x, step, y), "inputs of a layer",
          {rows.size, rows.width});
  }
  void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows, T* dx,
                         std::size_t step) const {
    check(cuda::mix_rows_backward(stream_.native(), dy, how, of_rows, dx, step),
          "gradient of the inputs of a layer", {dy.size, dy.width});
  }

 private:
  void check(cudaError_t code, const char* what, ShapeOfWork shape) const {
    if (code == cudaSuccess && !checks_) return;
    check_work(code, what, shape, stream_);
  }

  device::CudaStream& stream_;
  bool checks_;
};

}  // namespace ballast::model::cuda
