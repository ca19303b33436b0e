#include <algorithm>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

namespace {

constexpr unsigned kConvolutionThreads = 128;
constexpr unsigned kTaps = kMaxConvolutionTaps;
/// Stretches of rows that threads process in parallel in the backward pass, and the least rows of
/// one.
constexpr std::size_t kStretches = 64;
constexpr std::size_t kLeastStretch = 64;

/// Stretches of rows of a sequence.
struct Stretches {
  std::size_t count;  ///< per sequence
  std::size_t rows;
};
Stretches stretches_of(const DeltaShape& shape) {
  const std::size_t most = std::max<std::size_t>(kStretches / shape.sequences, 1);
  const std::size_t wanted = std::min((shape.length + kLeastStretch - 1) / kLeastStretch, most);
  const std::size_t rows = (shape.length + wanted - 1) / wanted;
  return {(shape.length + rows - 1) / rows, rows};
}

/// Returns the number of rows that the convolution reads for `row`.
__device__ unsigned taps_of_row(const DeltaShape& shape, const std::int32_t* positions,
                                std::size_t row) {
  const std::size_t position =
      positions == nullptr ? row % shape.length : static_cast<std::size_t>(positions[row]);
  return static_cast<unsigned>(position + 1 < shape.taps ? position + 1 : shape.taps);
}

/// Blocks are x: channels, y: rows. Threads have one channel of one row.
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    convolve_rows(DeltaShape shape, Convolution<T> how, const T* x, T* y) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels()) return;
  const T* const weight = how.weight + channel * shape.taps;
  for (std::size_t row = blockIdx.y; row < shape.tokens(); row += gridDim.y) {
    const unsigned taps = taps_of_row(shape, how.positions, row);
    float sum = 0.0F;
    for (unsigned back = 0; back < taps; ++back) {
      sum = __fmaf_rn(device::widen(weight[shape.taps - 1 - back]),
                      device::widen(x[(row - back) * shape.row() + channel]), sum);
    }
    device::narrow(formulas::silu(sum), y[row * shape.channels() + channel]);
  }
}

/// Copies the gradients of the first taps - 1 rows of each stretch, which the stretch overwrites
/// and the one before it reads. Blocks are x: channels, y: stretches, z: sequences.
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    save_first_rows(DeltaShape shape, Stretches stretches, const T* dy, T* saved) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels()) return;
  const std::size_t stretch = blockIdx.z * stretches.count + blockIdx.y;
  for (std::size_t i = 0; i + 1 < shape.taps; ++i) {
    const std::size_t row = blockIdx.y * stretches.rows + i;
    if (row >= shape.length) return;
    saved[(stretch * (shape.taps - 1) + i) * shape.channels() + channel] =
        dy[(blockIdx.z * shape.length + row) * shape.row() + channel];
  }
}

/// A channel while a thread goes through the rows of a stretch.
struct Channel {
  float weight[kTaps] = {};  ///< weight of the row itself, then weights of the rows before it
  float sum[kTaps] = {};     ///< gradients of the weights
  float before[kTaps] = {};  ///< x of the row and of those before it
  float open[kTaps] = {};    ///< gradients of these rows

  __device__ void next(float x) {
    for (unsigned k = kTaps - 1; k > 0; --k) {
      before[k] = before[k - 1];
      open[k] = open[k - 1];
    }
    before[0] = x;
    open[0] = 0.0F;
  }
  /// Adds the contributions of a row with `taps` taps. `own`: it belongs to the stretch.
  __device__ void add(unsigned taps, float dy, bool own) {
    float z = 0.0F;
    for (unsigned k = 0; k < kTaps; ++k) {
      if (k < taps) z = __fmaf_rn(weight[k], before[k], z);
    }
    const float dz = dy * formulas::silu_derivative(z, formulas::sigmoid(z));
    for (unsigned k = 0; k < kTaps; ++k) {
      if (k >= taps) continue;
      if (own) sum[k] = __fmaf_rn(dz, before[k], sum[k]);
      open[k] = __fmaf_rn(dz, weight[k], open[k]);
    }
  }
};

/// Blocks are x: channels, y: stretches, z: sequences. `sums`: [stretches, taps, channels].
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    differentiate_rows(DeltaShape shape, Stretches stretches, Convolution<T> how, const T* x, T* dy,
                       const T* saved, float* sums) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels()) return;
  const std::size_t taps = shape.taps;
  const std::size_t first = blockIdx.z * shape.length;  // row of the sequence
  const std::size_t begin = blockIdx.y * stretches.rows;
  const std::size_t end = std::min(begin + stretches.rows, shape.length);
  const std::size_t beyond = std::min(end + taps - 1, shape.length);
  const std::size_t next = blockIdx.z * stretches.count + blockIdx.y + 1;
  x += first * shape.row() + channel;
  dy += first * shape.row() + channel;
  Channel c;
  for (unsigned k = 0; k < taps; ++k) {
    c.weight[k] = device::widen(how.weight[channel * taps + taps - 1 - k]);
  }
  for (std::size_t row = begin - std::min(begin, taps - 1); row < begin; ++row) {
    c.next(device::widen(x[row * shape.row()]));
  }
  for (std::size_t row = begin; row < end + taps - 1; ++row) {
    const bool there = row < beyond;
    c.next(there ? device::widen(x[row * shape.row()]) : 0.0F);
    if (there) {
      const float d = device::widen(
          row < end ? dy[row * shape.row()]
                    : saved[(next * (taps - 1) + row - end) * shape.channels() + channel]);
      c.add(taps_of_row(shape, how.positions, first + row), d, row < end);
    }
    if (row >= begin + taps - 1)
      device::narrow(c.open[taps - 1], dy[(row + 1 - taps) * shape.row()]);
  }
  for (unsigned k = 0; k < taps; ++k) {
    sums[((next - 1) * taps + taps - 1 - k) * shape.channels() + channel] = c.sum[k];
  }
}

/// Adds the sums of the stretches in their order.
__global__ void __launch_bounds__(kConvolutionThreads)
    add_tap_sums(DeltaShape shape, std::size_t stretches, const float* sums, float* gradient) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels()) return;
  for (std::size_t tap = 0; tap < shape.taps; ++tap) {
    float sum = 0.0F;
    for (std::size_t i = 0; i < stretches; ++i) {
      sum += sums[(i * shape.taps + tap) * shape.channels() + channel];
    }
    gradient[channel * shape.taps + tap] += sum;
  }
}

unsigned blocks_of_channels(const DeltaShape& shape) {
  return static_cast<unsigned>((shape.channels() + kConvolutionThreads - 1) / kConvolutionThreads);
}

/// Memory of the backward pass. T's elements need no more than floats.
struct ConvolutionScratch {
  float* sums;
  float* saved;
};
ConvolutionScratch take_scratch(Bump& bump, const DeltaShape& shape) {
  if (shape.tokens() == 0 || shape.taps == 0) return {};
  const std::size_t stretches = stretches_of(shape).count * shape.sequences;
  return {bump.take<float>(stretches * shape.taps * shape.channels()),
          bump.take<float>(stretches * (shape.taps - 1) * shape.channels())};
}

}  // namespace

std::size_t convolution_scratch_bytes(const DeltaShape& shape) {
  Bump counting;
  take_scratch(counting, shape);
  return counting.used();
}

template <class T>
cudaError_t convolve(cudaStream_t stream, const DeltaShape& shape, const Convolution<T>& how,
                     const T* x, T* y) {
  if (shape.tokens() == 0) return cudaSuccess;
  constexpr std::size_t kMaxRows = 32768;
  return device::launch({.stream = stream,
                         .blocks = {blocks_of_channels(shape),
                                    static_cast<unsigned>(std::min(shape.tokens(), kMaxRows))},
                         .threads = kConvolutionThreads},
                        &convolve_rows<T>, shape, how, x, y);
}

template <class T>
cudaError_t convolve_backward(cudaStream_t stream, const DeltaShape& shape,
                              const Convolution<T>& how, const T* x, T* dy, std::byte* scratch) {
  if (shape.tokens() == 0) return cudaSuccess;
  Bump bump(scratch);
  const ConvolutionScratch s = take_scratch(bump, shape);
  const Stretches stretches = stretches_of(shape);
  const device::LaunchConfig by_stretches = {
      .stream = stream,
      .blocks = {blocks_of_channels(shape), static_cast<unsigned>(stretches.count),
                 static_cast<unsigned>(shape.sequences)},
      .threads = kConvolutionThreads};
  T* const saved = reinterpret_cast<T*>(s.saved);
  cudaError_t code = device::launch(by_stretches, &save_first_rows<T>, shape, stretches, dy, saved);
  if (code != cudaSuccess) return code;
  code = device::launch(by_stretches, &differentiate_rows<T>, shape, stretches, how, x, dy, saved,
                        s.sums);
  if (code != cudaSuccess || how.weight_gradient == nullptr) return code;
  return device::launch(
      {.stream = stream, .blocks = blocks_of_channels(shape), .threads = kConvolutionThreads},
      &add_tap_sums, shape, stretches.count * shape.sequences, s.sums, how.weight_gradient);
}

#define BALLAST_CONVOLUTIONS(T)                                                                   \
  template cudaError_t convolve(cudaStream_t, const DeltaShape&, const Convolution<T>&, const T*, \
                                T*);                                                              \
  template cudaError_t convolve_backward(cudaStream_t, const DeltaShape&, const Convolution<T>&,  \
                                         const T*, T*, std::byte*);
BALLAST_CONVOLUTIONS(float)
BALLAST_CONVOLUTIONS(Bf16)
BALLAST_CONVOLUTIONS(F16)
#undef BALLAST_CONVOLUTIONS

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
