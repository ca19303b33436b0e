#include "src/model/cuda/rows/row_pieces.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

/// There is one block per row of a part's heads and part of its columns.
template <class T>
__global__ void move_heads(Regrouping how, const T* from, T* to) {
  const std::size_t column = own_column<T>();
  if (column >= how.width()) return;
  const std::size_t row = blockIdx.x;
  device::write(device::read<kOneAccess<T>>(from + how.at(how.from, row, column)),
                to + how.at(how.to, row, column));
}

}  // namespace

template <class T>
cudaError_t regroup(cudaStream_t stream, const Regrouping& how, const T* from, T* to) {
  if (how.rows() == 0 || how.width() == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, how.rows(), how.width()), &move_heads<T>, how, from, to);
}

template cudaError_t regroup(cudaStream_t, const Regrouping&, const float*, float*);
template cudaError_t regroup(cudaStream_t, const Regrouping&, const Bf16*, Bf16*);
template cudaError_t regroup(cudaStream_t, const Regrouping&, const F16*, F16*);

}  // namespace ballast::model::cuda
