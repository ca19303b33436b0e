#include "src/device/cuda/eight.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/row_pieces.h"
#include "src/model/cuda/rows/row_team.h"

namespace ballast::model::cuda {
namespace {

/// Groups of eight elements that a thread of dot() keeps in registers.
constexpr unsigned kHeld = 2;

/// Returns the place of choice `i`.
__device__ unsigned place_of(const ExpertRows& rows, unsigned i) {
  return rows.places == nullptr ? i : static_cast<unsigned>(rows.places[i]);
}

/// Returns the token of a choice.
__device__ std::size_t row_of(const ExpertRows& rows, unsigned place) {
  return place / static_cast<unsigned>(rows.per_token);
}

/// product / weight, or 0 for a weight of 0.
__device__ float quotient(float product, float weight) {
  return weight == 0.0F ? 0.0F : product / weight;
}

template <class T>
__device__ Piece<T> times(const Piece<T>& piece, float factor) {
  float values[kOneAccess<T>];
  device::widen(piece, values);
  for (float& value : values) value *= factor;
  Piece<T> product;
  device::narrow(values, product);
  return product;
}

/// There is one block per row of y and part of its columns.
template <class T>
__global__ void gather_to_experts(ExpertRows rows, const T* x, const float* weights, T* y,
                                  std::size_t width) {
  const std::size_t column = own_column<T>();
  if (column >= width) return;
  Piece<T> piece;
  if (blockIdx.x < rows.count) {
    const unsigned place = place_of(rows, blockIdx.x);
    piece = device::read<kOneAccess<T>>(x + row_of(rows, place) * width + column);
    if (weights != nullptr) piece = times<T>(piece, weights[place]);
  }
  device::write(piece, y + blockIdx.x * width + column);
}

/// There is one block per choice. kOfAll: `activated` is one row for all choices, and its part is
/// added.
template <bool kOfAll, class T>
__global__ void __launch_bounds__(kMostThreads)
    dot(ExpertRows rows, const T* activated, const T* gradients, const float* weights,
        float* weight_gradients, std::size_t width) {
  Team<Fit::beyond> team;
  const Share<Fit::beyond, kHeld> share(team, static_cast<unsigned>(width));
  const unsigned place = place_of(rows, blockIdx.x);
  const T* const values = activated + (kOfAll ? 0 : blockIdx.x * width);
  const T* const row = gradients + blockIdx.x * width;
  Eight<T> kept[kHeld];
  share.keep(row, kept);
  float product[1] = {};
  share.each(row, kept, [&](unsigned at, const float(&gradient)[kEight]) {
    float value[kEight];
    device::read(values + at, value);
    for (unsigned i = 0; i < kEight; ++i) product[0] += gradient[i] * value[i];
  });
  team.sum(product);
  if (team.rank() != 0) return;
  const float gradient = weights == nullptr ? product[0] : quotient(product[0], weights[place]);
  weight_gradients[place] = kOfAll ? weight_gradients[place] + gradient : gradient;
}

__global__ void put(ExpertRows rows, const float* values, const float* weights, float* to) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows.count) return;
  const unsigned place = place_of(rows, i);
  to[place] = quotient(values[i], weights[place]);
}

/// There is one block per row and part of its columns.
template <class T>
__global__ void add_bias_to_rows(const T* bias, float* y, std::size_t width) {
  const std::size_t column = own_column<float>();
  if (column >= width) return;
  float* const to = y + blockIdx.x * width + column;
  float values[kOneAccess<float>];
  device::read(to, values);
  for (unsigned i = 0; i < kOneAccess<float>; ++i) values[i] += device::widen(bias[column + i]);
  device::write(values, to);
}

/// There is one block per choice and part of its columns.
__global__ void add_rows_to_sums(ExpertRows rows, const float* y, const float* weights, float* sums,
                                 std::size_t width) {
  const std::size_t column = own_column<float>();
  if (column >= width) return;
  const unsigned place = place_of(rows, blockIdx.x);
  const float weight = weights == nullptr ? 1.0F : weights[place];
  float* const to = sums + row_of(rows, place) * width + column;
  float sum[kOneAccess<float>];
  float values[kOneAccess<float>];
  device::read(to, sum);
  device::read(y + blockIdx.x * width + column, values);
  for (unsigned i = 0; i < kOneAccess<float>; ++i) sum[i] += values[i] * weight;
  device::write(sum, to);
}

device::LaunchConfig by_choices(cudaStream_t stream, const ExpertRows& rows, std::size_t width) {
  return {.stream = stream,
          .blocks = static_cast<unsigned>(rows.count),
          .threads = threads_of_row(width, kHeld)};
}

}  // namespace

template <class T>
cudaError_t gather_rows(cudaStream_t stream, const ExpertRows& rows, const T* x,
                        const float* weights, T* y, std::size_t padded, std::size_t width) {
  if (padded == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<T>(stream, padded, width), &gather_to_experts<T>, rows, x, weights,
                        y, width);
}

template <class T>
cudaError_t dot_rows(cudaStream_t stream, const ExpertRows& rows, const T* activated,
                     const T* gradients, const float* weights, float* weight_gradients,
                     std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_choices(stream, rows, width), &dot<false, T>, rows, activated, gradients,
                        weights, weight_gradients, width);
}

template <class T>
cudaError_t dot_bias(cudaStream_t stream, const ExpertRows& rows, const T* bias, const T* gradients,
                     const float* weights, float* weight_gradients, std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_choices(stream, rows, width), &dot<true, T>, rows, bias, gradients,
                        weights, weight_gradients, width);
}

cudaError_t put_quotients(cudaStream_t stream, const ExpertRows& rows, const float* values,
                          const float* weights, float* to) {
  constexpr unsigned kThreads = 128;
  if (rows.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((rows.count + kThreads - 1) / kThreads);
  return device::launch({.stream = stream, .blocks = blocks, .threads = kThreads}, &put, rows,
                        values, weights, to);
}

template <class T>
cudaError_t add_bias(cudaStream_t stream, const T* bias, float* y, std::size_t rows,
                     std::size_t width) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<float>(stream, rows, width), &add_bias_to_rows<T>, bias, y, width);
}

cudaError_t add_rows(cudaStream_t stream, const ExpertRows& rows, const float* y,
                     const float* weights, float* sums, std::size_t width) {
  if (rows.count == 0 || width == 0) return cudaSuccess;
  return device::launch(by_rows<float>(stream, rows.count, width), &add_rows_to_sums, rows, y,
                        weights, sums, width);
}

template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const float*, const float*,
                                 float*, std::size_t, std::size_t);
template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const Bf16*, const float*, Bf16*,
                                 std::size_t, std::size_t);
template cudaError_t gather_rows(cudaStream_t, const ExpertRows&, const F16*, const float*, F16*,
                                 std::size_t, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const float*, const float*,
                              const float*, float*, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const Bf16*, const Bf16*,
                              const float*, float*, std::size_t);
template cudaError_t dot_rows(cudaStream_t, const ExpertRows&, const F16*, const F16*, const float*,
                              float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const float*, const float*,
                              const float*, float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const Bf16*, const Bf16*,
                              const float*, float*, std::size_t);
template cudaError_t dot_bias(cudaStream_t, const ExpertRows&, const F16*, const F16*, const float*,
                              float*, std::size_t);
template cudaError_t add_bias(cudaStream_t, const float*, float*, std::size_t, std::size_t);
template cudaError_t add_bias(cudaStream_t, const Bf16*, float*, std::size_t, std::size_t);
template cudaError_t add_bias(cudaStream_t, const F16*, float*, std::size_t, std::size_t);

}  // namespace ballast::model::cuda
