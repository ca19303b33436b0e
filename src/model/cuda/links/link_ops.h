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
  LinkOps(device::CudaStream& stream, std::uint32_t* links, bool checks)
      : stream_(stream), links_(links), checks_(checks) {}

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
  void mix_rows_backward(const TokenRows<float>& table, const TokenMix& how,
                         const std::int32_t* tokens, std::size_t rows, const T* dy, T* dx,
                         std::size_t step) const {
    check(cuda::mix_rows_backward(stream_.native(), table, how, tokens, rows, dy, dx, step, links_),
          "gradient of the inputs of a layer", {rows, table.width});
  }

 private:
  void check(cudaError_t code, const char* what, ShapeOfWork shape) const {
    if (code == cudaSuccess && !checks_) return;
    check_work(code, what, shape, stream_);
  }

  device::CudaStream& stream_;
  std::uint32_t* links_;
  bool checks_;
};

}  // namespace ballast::model::cuda
