#include "src/device/cuda/eight.h"
#include "src/model/cuda/links/links.h"
#include "src/model/cuda/rows/row_pieces.h"

// All kernels have one block per row and part of its columns.

namespace ballast::model::cuda {
namespace {

template <bool adds, class T>
__global__ void put_columns(const T* x, std::size_t step, std::size_t width, float* sums) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  float* const to = sums + blockIdx.x * width + column;
  float values[kOneAccess<T>];
  device::read(x + blockIdx.x * step + column, values);
  if constexpr (adds) {
    float sum[kOneAccess<T>];
    device::read(to, sum);
    for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] += sum[i];
  }
  device::write(values, to);
}

template <class T>
__global__ void add_to_columns(const float* sums, std::size_t width, T* x, std::size_t step) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  T* const to = x + blockIdx.x * step + column;
  float values[kOneAccess<T>];
  float sum[kOneAccess<T>];
  device::read(to, values);
  device::read(sums + blockIdx.x * width + column, sum);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] += sum[i];
  device::write(values, to);
}

template <class T>
__global__ void mix(TokenRows<const T> rows, TokenMix how, const T* x, std::size_t step, T* y) {
  const std::size_t column = own_column<T>();
  if (column >= rows.width) return;
  float row[kOneAccess<T>];
  device::read(rows.rows + blockIdx.x * rows.width + column, row);
  for (float& value : row) value = device::rounded_product(value, how.scale);
  Piece<T> scaled;
  device::narrow(row, scaled);
  device::widen(scaled, row);
  float values[kOneAccess<T>];
  device::read(x + blockIdx.x * step + column, values);
  for (unsigned i = 0; i < kOneAccess<T>; ++i) values[i] = (values[i] + row[i]) * how.factor;
  device::write(values, y + blockIdx.x * rows.width + column);
}

template <class T>
__global__ void mix_backward(const T* dy, std::size_t width, TokenMix how, float* of_rows, T* dx,
                             std::size_t step) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  float values[kOneAccess<T>];
  device::read(dy + blockIdx.x * width + column, values);
  if (of_rows != nullptr) {
    float scaled[kOneAccess<T>];
    for (unsigned i = 0; i < kOneAccess<T>; ++i) scaled[i] = values[i] * (how.factor * how.scale);
    device::write(scaled, of_rows + blockIdx.x * width + column);
  }
  if (dx == nullptr) return;
  for (float& value : values) value *= how.factor;
  device::write(values, dx + blockIdx.x * step + column);
}

}  // namespace

template <class T>
cudaError_t put_sums(cudaStream_t stream, const T* x, std::size_t step, Rows rows, bool adds,
                     float* sums) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.count, rows.width),
                        adds ? &put_columns<true, T> : &put_columns<false, T>, x, step, rows.width,
                        sums);
}

template <class T>
cudaError_t add_sums(cudaStream_t stream, const float* sums, Rows rows, T* x, std::size_t step) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.count, rows.width), &add_to_columns<T>, sums,
                        rows.width, x, step);
}

template <class T>
cudaError_t mix_rows(cudaStream_t stream, const TokenRows<const T>& rows, const TokenMix& how,
                     const T* x, std::size_t step, T* y) {
  if (rows.size == 0 || rows.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, rows.size, rows.width), &mix<T>, rows, how, x, step, y);
}

template <class T>
cudaError_t mix_rows_backward(cudaStream_t stream, const TokenRows<const T>& dy,
                              const TokenMix& how, float* of_rows, T* dx, std::size_t step) {
  if (dy.size == 0 || dy.width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, dy.size, dy.width), &mix_backward<T>, dy.rows, dy.width,
                        how, of_rows, dx, step);
}

#define BALLAST_LINKS(T)                                                                           \
  template cudaError_t put_sums(cudaStream_t, const T*, std::size_t, Rows, bool, float*);          \
  template cudaError_t add_sums(cudaStream_t, const float*, Rows, T*, std::size_t);                \
  template cudaError_t mix_rows(cudaStream_t, const TokenRows<const T>&, const TokenMix&,          \
                                const T*, std::size_t, T*);                                        \
  template cudaError_t mix_rows_backward(cudaStream_t, const TokenRows<const T>&, const TokenMix&, \
                                         float*, T*, std::size_t);
BALLAST_LINKS(float)
BALLAST_LINKS(Bf16)
BALLAST_LINKS(F16)
#undef BALLAST_LINKS

}  // namespace ballast::model::cuda
