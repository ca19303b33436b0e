#include <algorithm>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

namespace {

using device::kEight;
using device::kWarp;

constexpr unsigned kGateThreads = 256;
constexpr unsigned kWarpsOfBlock = kGateThreads / kWarp;
/// Warps that sum gradients of the weight of a gated norm.
constexpr std::size_t kMaxSummingWarps = 1024;

/// A warp's place: one head of one row, and the columns of its lane. A head has at most one group
/// of eight per lane.
struct HeadOfRow {
  std::size_t at;    ///< in rows of DeltaShape::values()
  std::size_t gate;  ///< in rows of DeltaShape::row()
  bool here;         ///< the lane has columns
};
__device__ HeadOfRow head_of_row(const DeltaShape& shape, std::size_t unit) {
  const std::size_t column = threadIdx.x % kWarp * kEight;
  const std::size_t row = unit / shape.value_heads;
  const std::size_t head = unit % shape.value_heads * shape.value_width;
  return {row * shape.values() + head + column, row * shape.row() + head + column,
          column < shape.value_width};
}

/// 1 / deviation of a head, of which `x` are this lane's values.
__device__ float inverse_deviation_of(const float (&x)[kEight], const DeltaShape& shape,
                                      float epsilon) {
  float squares = 0.0F;
  for (const float value : x) squares = __fmaf_rn(value, value, squares);
  return formulas::inverse_deviation(
      device::warp_sum(squares) / static_cast<float>(shape.value_width), epsilon);
}

/// There is one warp per head and row.
template <class T>
__global__ void __launch_bounds__(kGateThreads)
    norm_and_gate(DeltaShape shape, GatedNorm<T> norm, const T* x, const T* gate, T* y) {
  const std::size_t unit = std::size_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / kWarp;
  if (unit >= shape.tokens() * shape.value_heads) return;
  const HeadOfRow place = head_of_row(shape, unit);
  float values[kEight] = {};
  if (place.here) device::read(x + place.at, values);
  const float factor = inverse_deviation_of(values, shape, norm.epsilon);
  if (!place.here) return;
  float weights[kEight];
  float gates[kEight];
  device::read(norm.weight + threadIdx.x % kWarp * kEight, weights);
  device::read(gate + place.gate, gates);
  for (unsigned i = 0; i < kEight; ++i) {
    values[i] = values[i] * factor * weights[i] * formulas::silu(gates[i]);
  }
  device::write(values, y + place.at);
}

/// A warp processes every gridDim.x * kWarpsOfBlock-th head and keeps the sums of the weight's
/// gradients. `sums`: [warps, value_width].
template <class T>
__global__ void __launch_bounds__(kGateThreads)
    differentiate_norm_and_gate(DeltaShape shape, GatedNorm<T> norm, const T* x, const T* gate,
                                T* dy, T* dgate, float* sums) {
  const std::size_t warp = std::size_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / kWarp;
  const std::size_t units = shape.tokens() * shape.value_heads;
  const unsigned column = threadIdx.x % kWarp * kEight;
  const bool here = column < shape.value_width;
  float weights[kEight] = {};
  float weight_sums[kEight] = {};
  if (here) device::read(norm.weight + column, weights);
  for (std::size_t unit = warp; unit < units; unit += gridDim.x * kWarpsOfBlock) {
    const HeadOfRow place = head_of_row(shape, unit);
    float n[kEight] = {};
    float z[kEight] = {};
    float d[kEight] = {};
    if (here) {
      device::read(x + place.at, n);
      device::read(gate + place.gate, z);
      device::read(dy + place.at, d);
    }
    const float factor = inverse_deviation_of(n, shape, norm.epsilon);
    float sum = 0.0F;
    float dz[kEight];
    for (unsigned i = 0; i < kEight; ++i) {
      n[i] *= factor;
      const float s = formulas::sigmoid(z[i]);
      dz[i] = d[i] * n[i] * weights[i] * formulas::silu_derivative(z[i], s);
      const float dn = d[i] * z[i] * s;
      weight_sums[i] = __fmaf_rn(dn, n[i], weight_sums[i]);
      d[i] = dn * weights[i];
      sum = __fmaf_rn(d[i], n[i], sum);
    }
    const float mean = device::warp_sum(sum) / static_cast<float>(shape.value_width);
    for (unsigned i = 0; i < kEight; ++i) {
      d[i] = formulas::norm_derivative(d[i], n[i], 0.0F, mean, factor);
    }
    if (!here) continue;
    device::write(dz, dgate + place.gate);
    device::write(d, dy + place.at);
  }
  if (here) device::write(weight_sums, sums + warp * shape.value_width + column);
}

/// A thread has eight columns.
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    gate_rows(GatedRows rows, const T* x, const T* gate, T* y) {
  const std::size_t at = (std::size_t{blockIdx.x} * kElementThreads + threadIdx.x) * kEight;
  if (at >= rows.count * rows.width) return;
  float values[kEight];
  float gates[kEight];
  device::read(x + at, values);
  device::read(gate + at / rows.width * rows.gate_step + at % rows.width, gates);
  for (unsigned i = 0; i < kEight; ++i) values[i] *= formulas::sigmoid(gates[i]);
  device::write(values, y + at);
}

template <class T>
__global__ void __launch_bounds__(kElementThreads)
    differentiate_gates(GatedRows rows, const T* x, T* gate, T* dy) {
  const std::size_t at = (std::size_t{blockIdx.x} * kElementThreads + threadIdx.x) * kEight;
  if (at >= rows.count * rows.width) return;
  T* const gates_at = gate + at / rows.width * rows.gate_step + at % rows.width;
  float values[kEight];
  float gates[kEight];
  float d[kEight];
  device::read(x + at, values);
  device::read(gates_at, gates);
  device::read(dy + at, d);
  for (unsigned i = 0; i < kEight; ++i) {
    const float s = formulas::sigmoid(gates[i]);
    gates[i] = d[i] * values[i] * s * (1.0F - s);
    d[i] *= s;
  }
  device::write(gates, gates_at);
  device::write(d, dy + at);
}

/// Blocks whose warps sum gradients of the weight.
std::size_t summing_blocks(const DeltaShape& shape) {
  const std::size_t warps = std::min(shape.tokens() * shape.value_heads, kMaxSummingWarps);
  return (warps + kWarpsOfBlock - 1) / kWarpsOfBlock;
}

}  // namespace

template <class T>
cudaError_t gated_norm(cudaStream_t stream, const DeltaShape& shape, const GatedNorm<T>& norm,
                       const T* x, const T* gate, T* y) {
  const std::size_t units = shape.tokens() * shape.value_heads;
  if (units == 0) return cudaSuccess;
  return device::launch(
      {.stream = stream,
       .blocks = static_cast<unsigned>((units + kWarpsOfBlock - 1) / kWarpsOfBlock),
       .threads = kGateThreads},
      &norm_and_gate<T>, shape, norm, x, gate, y);
}

template <class T>
cudaError_t gated_norm_backward(cudaStream_t stream, const DeltaShape& shape,
                                const GatedNorm<T>& norm, const T* x, const T* gate, T* dy,
                                T* dgate, float* partials) {
  if (shape.tokens() == 0) return cudaSuccess;
  const std::size_t blocks = summing_blocks(shape);
  const cudaError_t code = device::launch(
      {.stream = stream, .blocks = static_cast<unsigned>(blocks), .threads = kGateThreads},
      &differentiate_norm_and_gate<T>, shape, norm, x, gate, dy, dgate, partials);
  if (code != cudaSuccess) return code;
  return add_partials(stream, {partials, blocks * kWarpsOfBlock, shape.value_width, false},
                      norm.weight_gradient, nullptr);
}

std::size_t gated_norm_partials(const DeltaShape& shape) {
  return summing_blocks(shape) * kWarpsOfBlock * shape.value_width;
}

template <class T>
cudaError_t sigmoid_gate(cudaStream_t stream, const GatedRows& rows, const T* x, const T* gate,
                         T* y) {
  if (rows.count == 0) return cudaSuccess;
  return device::launch({.stream = stream,
                         .blocks = blocks_of(rows.count * rows.width / kEight),
                         .threads = kElementThreads},
                        &gate_rows<T>, rows, x, gate, y);
}

template <class T>
cudaError_t sigmoid_gate_backward(cudaStream_t stream, const GatedRows& rows, const T* x, T* gate,
                                  T* dy) {
  if (rows.count == 0) return cudaSuccess;
  return device::launch({.stream = stream,
                         .blocks = blocks_of(rows.count * rows.width / kEight),
                         .threads = kElementThreads},
                        &differentiate_gates<T>, rows, x, gate, dy);
}

#define BALLAST_GATES(T)                                                                          \
  template cudaError_t gated_norm(cudaStream_t, const DeltaShape&, const GatedNorm<T>&, const T*, \
                                  const T*, T*);                                                  \
  template cudaError_t gated_norm_backward(cudaStream_t, const DeltaShape&, const GatedNorm<T>&,  \
                                           const T*, const T*, T*, T*, float*);                   \
  template cudaError_t sigmoid_gate(cudaStream_t, const GatedRows&, const T*, const T*, T*);      \
  template cudaError_t sigmoid_gate_backward(cudaStream_t, const GatedRows&, const T*, T*, T*);
BALLAST_GATES(float)
BALLAST_GATES(Bf16)
BALLAST_GATES(F16)
#undef BALLAST_GATES

}  // namespace ballast::model::cuda
