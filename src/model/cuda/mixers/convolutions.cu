#include <algorithm>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/mixers/mixers.h"

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
Stretches stretches_of(const ConvolutionShape& shape) {
  const std::size_t most = std::max<std::size_t>(kStretches / shape.sequences, 1);
  const std::size_t wanted = std::min((shape.length + kLeastStretch - 1) / kLeastStretch, most);
  const std::size_t rows = (shape.length + wanted - 1) / wanted;
  return {(shape.length + rows - 1) / rows, rows};
}

/// Returns the number of rows that the convolution reads for `row`.
template <class T>
__device__ unsigned taps_of_row(const Convolution<T>& how, std::size_t row) {
  const std::size_t position = how.positions == nullptr
                                   ? row % how.shape.length
                                   : static_cast<std::size_t>(how.positions[row]);
  return static_cast<unsigned>(position + 1 < how.shape.taps ? position + 1 : how.shape.taps);
}

/// Blocks are x: channels, y: rows. Threads have one channel of one row.
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    convolve_rows(Convolution<T> how, const T* x, T* y) {
  const ConvolutionShape& shape = how.shape;
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  const T* const weight = how.weight + channel * shape.taps;
  for (std::size_t row = blockIdx.y; row < shape.tokens(); row += gridDim.y) {
    const unsigned taps = taps_of_row(how, row);
    float sum = 0.0F;
    for (unsigned back = 0; back < taps; ++back) {
      sum = __fmaf_rn(device::widen(weight[shape.taps - 1 - back]),
                      device::widen(x[(row - back) * shape.x_step + channel]), sum);
    }
    device::narrow(formulas::silu(sum), y[row * shape.channels + channel]);
  }
}

/// Convolves rows [B | C | x].
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    convolve_gated_rows(Convolution<T> how, const T* x, T* y) {
  const ConvolutionShape& shape = how.shape;
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  const T* const weight = how.weight + channel * shape.taps;
  for (std::size_t row = blockIdx.y; row < shape.tokens(); row += gridDim.y) {
    const unsigned taps = taps_of_row(how, row);
    const T* at = x + row * shape.x_step + channel;
    const float factor = device::widen(at[shape.channels]);
    float sum = shape.biased ? device::widen(how.bias[channel]) : 0.0F;
    for (unsigned back = 0; back < taps; ++back, at -= shape.x_step) {
      sum = __fmaf_rn(device::widen(weight[shape.taps - 1 - back]),
                      device::widen(at[0]) * device::widen(at[2 * shape.channels]), sum);
    }
    device::narrow(factor * sum, y[row * shape.channels + channel]);
  }
}

/// Copies the gradients of the first taps - 1 rows of each stretch, which the stretch overwrites
/// and the one before it reads. Blocks are x: channels, y: stretches, z: sequences.
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    save_first_rows(ConvolutionShape shape, Stretches stretches, const T* dy, T* saved) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  const std::size_t stretch = blockIdx.z * stretches.count + blockIdx.y;
  for (std::size_t i = 0; i + 1 < shape.taps; ++i) {
    const std::size_t row = blockIdx.y * stretches.rows + i;
    if (row >= shape.length) return;
    saved[(stretch * (shape.taps - 1) + i) * shape.channels + channel] =
        dy[(blockIdx.z * shape.length + row) * shape.x_step + channel];
  }
}

/// A channel while a thread goes through the rows of a stretch.
struct Channel {
  float weight[kTaps] = {};  ///< weight of the row itself, then weights of the rows before it
  float sum[kTaps] = {};     ///< gradients of the weights
  float before[kTaps] = {};  ///< x of the row and of those before it
  float open[kTaps] = {};    ///< gradients of these rows

  template <class T>
  __device__ void load(const Convolution<T>& how, std::size_t channel) {
    const std::size_t taps = how.shape.taps;
    for (unsigned k = 0; k < taps; ++k) {
      weight[k] = device::widen(how.weight[channel * taps + taps - 1 - k]);
    }
  }
  __device__ void next(float x) {
    for (unsigned k = kTaps - 1; k > 0; --k) {
      before[k] = before[k - 1];
      open[k] = open[k - 1];
    }
    before[0] = x;
    open[0] = 0.0F;
  }
  /// Returns `z` plus the products of `taps` rows.
  __device__ float value(float z, unsigned taps) const {
    for (unsigned k = 0; k < kTaps; ++k) {
      if (k < taps) z = __fmaf_rn(weight[k], before[k], z);
    }
    return z;
  }
  /// Adds the contributions of a row with `taps` taps. `own`: it belongs to the stretch.
  __device__ void add(unsigned taps, float dz, bool own) {
    for (unsigned k = 0; k < kTaps; ++k) {
      if (k >= taps) continue;
      if (own) sum[k] = __fmaf_rn(dz, before[k], sum[k]);
      open[k] = __fmaf_rn(dz, weight[k], open[k]);
    }
  }
  /// Writes the gradients of the weights to the sums of a stretch.
  __device__ void put(const ConvolutionShape& shape, std::size_t stretch, std::size_t channel,
                      float* sums) const {
    for (unsigned k = 0; k < shape.taps; ++k) {
      sums[(stretch * shape.parameters() + shape.taps - 1 - k) * shape.channels + channel] = sum[k];
    }
  }
};

/// The rows of a stretch, in its sequence.
struct RowsOfStretch {
  std::size_t first;  ///< number of the sequence's first row in the micro-batch
  std::size_t begin;
  std::size_t end;
  std::size_t beyond;  ///< end of the rows whose results depend on the stretch
  std::size_t number;

  __device__ RowsOfStretch(const ConvolutionShape& shape, const Stretches& stretches)
      : first(blockIdx.z * shape.length),
        begin(blockIdx.y * stretches.rows),
        end(std::min(begin + stretches.rows, shape.length)),
        beyond(std::min(end + shape.taps - 1, shape.length)),
        number(blockIdx.z * stretches.count + blockIdx.y) {}
  /// The first row that the stretch's results depend on.
  __device__ std::size_t before(std::size_t taps) const {
    return begin - std::min(begin, taps - 1);
  }
};

/// Blocks are x: channels, y: stretches, z: sequences. `sums`: [stretches, parameters, channels].
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    differentiate_rows(Convolution<T> how, Stretches stretches, const T* x, T* dy, const T* saved,
                       float* sums) {
  const ConvolutionShape& shape = how.shape;
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  const std::size_t taps = shape.taps;
  const RowsOfStretch rows(shape, stretches);
  x += rows.first * shape.x_step + channel;
  dy += rows.first * shape.x_step + channel;
  Channel c;
  c.load(how, channel);
  for (std::size_t row = rows.before(taps); row < rows.begin; ++row) {
    c.next(device::widen(x[row * shape.x_step]));
  }
  for (std::size_t row = rows.begin; row < rows.end + taps - 1; ++row) {
    const bool there = row < rows.beyond;
    c.next(there ? device::widen(x[row * shape.x_step]) : 0.0F);
    if (there) {
      const std::size_t later = (rows.number + 1) * (taps - 1) + row - rows.end;
      const float d = device::widen(row < rows.end ? dy[row * shape.x_step]
                                                   : saved[later * shape.channels + channel]);
      const unsigned used = taps_of_row(how, rows.first + row);
      const float z = c.value(0.0F, used);
      c.add(used, d * formulas::silu_derivative(z, formulas::sigmoid(z)), row < rows.end);
    }
    if (row >= rows.begin + taps - 1)
      device::narrow(c.open[taps - 1], dy[(row + 1 - taps) * shape.x_step]);
  }
  c.put(shape, rows.number, channel, sums);
}

/// Differentiates rows [B | C | x].
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    differentiate_gated_rows(Convolution<T> how, Stretches stretches, const T* x, const T* dy,
                             T* dx, float* sums) {
  const ConvolutionShape& shape = how.shape;
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  const std::size_t taps = shape.taps;
  const std::size_t wide = shape.channels;
  const RowsOfStretch rows(shape, stretches);
  x += rows.first * shape.x_step + channel;
  dx += rows.first * shape.x_step + channel;
  dy += rows.first * wide + channel;
  const auto product = [&](std::size_t row) {
    return device::widen(x[row * shape.x_step]) * device::widen(x[row * shape.x_step + 2 * wide]);
  };
  Channel c;
  c.load(how, channel);
  const float bias = shape.biased ? device::widen(how.bias[channel]) : 0.0F;
  float bias_sum = 0.0F;
  for (std::size_t row = rows.before(taps); row < rows.begin; ++row) c.next(product(row));
  for (std::size_t row = rows.begin; row < rows.end + taps - 1; ++row) {
    const bool there = row < rows.beyond;
    c.next(there ? product(row) : 0.0F);
    if (there) {
      const bool own = row < rows.end;
      const unsigned used = taps_of_row(how, rows.first + row);
      const float d = device::widen(dy[row * wide]);
      const float dz = d * device::widen(x[row * shape.x_step + wide]);
      if (own) {
        device::narrow(d * c.value(bias, used), dx[row * shape.x_step + wide]);
        bias_sum += dz;
      }
      c.add(used, dz, own);
    }
    if (row < rows.begin + taps - 1) continue;
    const std::size_t at = (row + 1 - taps) * shape.x_step;
    const float open = c.open[taps - 1];
    device::narrow(open * device::widen(x[at + 2 * wide]), dx[at]);
    device::narrow(open * device::widen(x[at]), dx[at + 2 * wide]);
  }
  c.put(shape, rows.number, channel, sums);
  if (shape.biased) sums[(rows.number * shape.parameters() + taps) * wide + channel] = bias_sum;
}

/// Adds the sums of the stretches in their order.
__global__ void __launch_bounds__(kConvolutionThreads)
    add_tap_sums(ConvolutionShape shape, std::size_t stretches, const float* sums, float* gradient,
                 float* bias_gradient) {
  const std::size_t channel = std::size_t{blockIdx.x} * kConvolutionThreads + threadIdx.x;
  if (channel >= shape.channels) return;
  for (std::size_t tap = 0; tap < shape.parameters(); ++tap) {
    float sum = 0.0F;
    for (std::size_t i = 0; i < stretches; ++i) {
      sum += sums[(i * shape.parameters() + tap) * shape.channels + channel];
    }
    float* to = bias_gradient == nullptr ? nullptr : bias_gradient + channel;
    if (tap < shape.taps) {
      to = gradient == nullptr ? nullptr : gradient + channel * shape.taps + tap;
    }
    if (to != nullptr) *to += sum;
  }
}

unsigned blocks_of_channels(const ConvolutionShape& shape) {
  return static_cast<unsigned>((shape.channels + kConvolutionThreads - 1) / kConvolutionThreads);
}
device::LaunchConfig by_rows(cudaStream_t stream, const ConvolutionShape& shape) {
  constexpr std::size_t kMaxRows = 32768;
  return {.stream = stream,
          .blocks = {blocks_of_channels(shape),
                     static_cast<unsigned>(std::min(shape.tokens(), kMaxRows))},
          .threads = kConvolutionThreads};
}
device::LaunchConfig by_stretches(cudaStream_t stream, const ConvolutionShape& shape) {
  return {.stream = stream,
          .blocks = {blocks_of_channels(shape), static_cast<unsigned>(stretches_of(shape).count),
                     static_cast<unsigned>(shape.sequences)},
          .threads = kConvolutionThreads};
}

/// Memory of the backward pass. T's elements need no more than floats.
struct ConvolutionScratch {
  float* sums;
  float* saved;
};
ConvolutionScratch take_scratch(Bump& bump, const ConvolutionShape& shape) {
  if (shape.tokens() == 0 || shape.taps == 0) return {};
  const std::size_t stretches = stretches_of(shape).count * shape.sequences;
  return {bump.take<float>(stretches * shape.parameters() * shape.channels),
          bump.take<float>(stretches * (shape.taps - 1) * shape.channels)};
}

template <class T>
cudaError_t add_gradients(cudaStream_t stream, const Convolution<T>& how, const float* sums) {
  if (how.weight_gradient == nullptr && how.bias_gradient == nullptr) return cudaSuccess;
  return device::launch(
      {.stream = stream, .blocks = blocks_of_channels(how.shape), .threads = kConvolutionThreads},
      &add_tap_sums, how.shape, stretches_of(how.shape).count * how.shape.sequences, sums,
      how.weight_gradient, how.bias_gradient);
}

}  // namespace

std::size_t convolution_scratch_bytes(const ConvolutionShape& shape) {
  Bump counting;
  take_scratch(counting, shape);
  return counting.used();
}

template <class T>
cudaError_t convolve(cudaStream_t stream, const Convolution<T>& how, const T* x, T* y) {
  if (how.shape.tokens() == 0) return cudaSuccess;
  return device::launch(by_rows(stream, how.shape), &convolve_rows<T>, how, x, y);
}

template <class T>
cudaError_t convolve_backward(cudaStream_t stream, const Convolution<T>& how, const T* x, T* dy,
                              std::byte* scratch) {
  const ConvolutionShape& shape = how.shape;
  if (shape.tokens() == 0) return cudaSuccess;
  Bump bump(scratch);
  const ConvolutionScratch s = take_scratch(bump, shape);
  const Stretches stretches = stretches_of(shape);
  T* const saved = reinterpret_cast<T*>(s.saved);
  cudaError_t code =
      device::launch(by_stretches(stream, shape), &save_first_rows<T>, shape, stretches, dy, saved);
  if (code != cudaSuccess) return code;
  code = device::launch(by_stretches(stream, shape), &differentiate_rows<T>, how, stretches, x, dy,
                        saved, s.sums);
  return code == cudaSuccess ? add_gradients(stream, how, s.sums) : code;
}

template <class T>
cudaError_t gated_convolve(cudaStream_t stream, const Convolution<T>& how, const T* x, T* y) {
  if (how.shape.tokens() == 0) return cudaSuccess;
  return device::launch(by_rows(stream, how.shape), &convolve_gated_rows<T>, how, x, y);
}

template <class T>
cudaError_t gated_convolve_backward(cudaStream_t stream, const Convolution<T>& how, const T* x,
                                    const T* dy, T* dx, std::byte* scratch) {
  if (how.shape.tokens() == 0) return cudaSuccess;
  Bump bump(scratch);
  float* const sums = take_scratch(bump, how.shape).sums;
  const cudaError_t code =
      device::launch(by_stretches(stream, how.shape), &differentiate_gated_rows<T>, how,
                     stretches_of(how.shape), x, dy, dx, sums);
  return code == cudaSuccess ? add_gradients(stream, how, sums) : code;
}

#define BALLAST_CONVOLUTIONS(T)                                                               \
  template cudaError_t convolve(cudaStream_t, const Convolution<T>&, const T*, T*);           \
  template cudaError_t convolve_backward(cudaStream_t, const Convolution<T>&, const T*, T*,   \
                                         std::byte*);                                         \
  template cudaError_t gated_convolve(cudaStream_t, const Convolution<T>&, const T*, T*);     \
  template cudaError_t gated_convolve_backward(cudaStream_t, const Convolution<T>&, const T*, \
                                               const T*, T*, std::byte*);
BALLAST_CONVOLUTIONS(float)
BALLAST_CONVOLUTIONS(Bf16)
BALLAST_CONVOLUTIONS(F16)
#undef BALLAST_CONVOLUTIONS

}  // namespace ballast::model::cuda
