#include "src/model/cuda/rows/row_threads.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {

namespace {

template <class T>
struct NormForward {
  const T* x;
  const T* weight;
  const T* bias;
  const T* residual;
  T* y;
  float epsilon;
  float offset;  ///< added to the weight
  Rows rows;
  NormRows places;
};

template <bool centred, RowFit fit, unsigned held, class T>
__global__ void __launch_bounds__(kMaxThreads) norm_rows(NormForward<T> a) {
  Team<fit> team;
  const std::size_t row = team.number();
  if (row >= a.rows.count) return;  // the whole team returns
  const auto width = static_cast<unsigned>(a.rows.width);
  const RowShare<fit, held> share(team, width);
  const std::size_t column = row % a.places.groups * a.rows.width;
  const T* const x = a.x + row / a.places.groups * a.places.x_step + column;
  const std::size_t out_at = row / a.places.groups * a.places.y_step + column;
  T* const y = a.y + out_at;
  Eight<T> kept[held];
  share.keep(x, kept);
  const RowStatistics s =
      row_statistics<centred>(team, share, x, kept, static_cast<float>(width), a.epsilon);
  share.each(x, kept, [&](unsigned at, const float(&values)[kEight]) {
    float weight[kEight];
    float bias[kEight] = {};
    float out[kEight];
    device::read(a.weight + at, weight);
    if constexpr (centred) {
      if (a.bias != nullptr) device::read(a.bias + at, bias);
    }
    for (unsigned i = 0; i < kEight; ++i) {
      out[i] = (values[i] - s.mean) * s.factor * (weight[i] + a.offset) + bias[i];
    }
    if (a.residual != nullptr) {
      float residual[kEight];
      device::read(a.residual + out_at + at, residual);
      for (unsigned i = 0; i < kEight; ++i) out[i] += residual[i];
    }
    device::write(out, y + at);
  });
}

template <bool centred, class T>
cudaError_t launch_norm(cudaStream_t stream, const NormForward<T>& a) {
  const auto rows = static_cast<unsigned>(a.rows.count);
  const std::size_t width = a.rows.width;
  if (width <= kNarrow) {
    return device::launch({.stream = stream,
                           .blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock,
                           .threads = kRowsOfBlock * kWarp},
                          &norm_rows<centred, RowFit::warp, kHeldByLane, T>, a);
  }
  const unsigned held = keeps(width, 1) ? 1 : keeps(width, 2) ? 2 : 4;
  return device::launch({.stream = stream, .blocks = rows, .threads = threads_of_row(width, held)},
                        held == 1         ? &norm_rows<centred, RowFit::block, 1, T>
                        : held == 2       ? &norm_rows<centred, RowFit::block, 2, T>
                        : keeps(width, 4) ? &norm_rows<centred, RowFit::block, 4, T>
                                          : &norm_rows<centred, RowFit::beyond, 4, T>,
                        a);
}

}  // namespace

template <class T>
cudaError_t norm(cudaStream_t stream, const T* x, const T* weight, const T* bias, float epsilon,
                 const T* residual, T* y, Rows rows, const NormRows& places, float offset,
                 bool centred) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  const NormForward<T> a = {
      x, weight, bias, residual, y, epsilon, offset, rows, places_of(places, rows)};
  return centred || bias != nullptr ? launch_norm<true>(stream, a) : launch_norm<false>(stream, a);
}

template cudaError_t norm(cudaStream_t, const float*, const float*, const float*, float,
                          const float*, float*, Rows, const NormRows&, float, bool);
template cudaError_t norm(cudaStream_t, const Bf16*, const Bf16*, const Bf16*, float, const Bf16*,
                          Bf16*, Rows, const NormRows&, float, bool);
template cudaError_t norm(cudaStream_t, const F16*, const F16*, const F16*, float, const F16*, F16*,
                          Rows, const NormRows&, float, bool);

namespace {

template <class T>
struct NormBackward {
  const T* x;
  const T* weight;
  const T* dy;
  const T* residual;
  T* dx;
  float* partials;
  float epsilon;
  float offset;  ///< added to the weight
  Rows rows;
  NormRows places;
};

/// Gradients of the weights and biases for eight columns, summed over rows. In memory, the biases'
/// gradients come `width` elements after the weights'.
template <bool centred>
struct Sums {
  float weight[kEight] = {};
  float bias[centred ? kEight : 1] = {};

  __device__ void add(const float* from, std::size_t width) {
    float more[kEight];
    device::read(from, more);
    for (unsigned i = 0; i < kEight; ++i) weight[i] += more[i];
    if constexpr (centred) {
      device::read(from + width, more);
      for (unsigned i = 0; i < kEight; ++i) bias[i] += more[i];
    }
  }
  __device__ void put(float* to, std::size_t width) const {
    device::write(weight, to);
    if constexpr (centred) device::write(bias, to + width);
  }
};

/// The part of a row that a thread keeps in registers.
template <unsigned held, class T>
struct HeldRow {
  Eight<T> x[held];
  Eight<T> dy[held];
};

/// Whether the next row is read while the threads still use this one. This needs registers for
/// both.
template <unsigned held, class T>
inline constexpr bool kAhead = held * sizeof(T) <= 4;

/// A row and the values that its gradient needs.
template <bool centred, RowFit fit, unsigned held, class T>
class BackwardRow {
 public:
  __device__ BackwardRow(const NormBackward<T>& a, const RowShare<fit, held>& share,
                         std::size_t row)
      : a_(a), share_(share) {
    const std::size_t long_row = row / a.places.groups;
    const std::size_t column = row % a.places.groups * a.rows.width;
    x_ = a.x + long_row * a.places.x_step + column;
    start_ = long_row * a.places.y_step + column;
  }

  __device__ void keep(HeldRow<held, T>& kept) const {
    share_.keep(x_, kept.x);
    share_.keep(a_.dy + start_, kept.dy);
  }

  /// Writes dx. Adds to `sums` for the columns in registers. The other columns are summed in
  /// `others` [columns], which is uninitialized if this row is the first.
  __device__ void run(Team<fit>& team, const HeldRow<held, T>& kept, Sums<centred> (&sums)[held],
                      float* others, bool first) {
    const std::size_t width = a_.rows.width;
    const auto count = static_cast<float>(width);
    Eight<T> residual[held];
    share_.each_held([&](unsigned k, unsigned at) {
      if (kAhead<held, T>) residual[k] = residual_at(at);
    });
    s_ = row_statistics<centred>(team, share_, x_, kept.x, count, a_.epsilon);
    share_.each_held([&](unsigned k, unsigned at) { add(at, kept.x[k], kept.dy[k], sums[k]); });
    share_.each_other([&](unsigned at) {
      Sums<centred> those;
      add(at, device::read(x_ + at), device::read(a_.dy + start_ + at), those);
      if (!first) those.add(others + at, width);
      those.put(others + at, width);
    });
    team.sum(means_);
    for (float& mean : means_) mean /= count;
    share_.each_held([&](unsigned k, unsigned at) {
      put(at, kept.x[k], kept.dy[k], kAhead<held, T> ? residual[k] : residual_at(at));
    });
    share_.each_other([&](unsigned at) {
      put(at, device::read(x_ + at), device::read(a_.dy + start_ + at), residual_at(at));
    });
  }

 private:
  __device__ Eight<T> residual_at(unsigned at) const {
    Eight<T> zeros = {};
    return a_.residual == nullptr ? zeros : device::read(a_.residual + start_ + at);
  }

  /// Adds to the sums over the row and over the columns.
  __device__ void add(unsigned at, const Eight<T>& x8, const Eight<T>& dy8, Sums<centred>& sums) {
    float x[kEight];
    float d[kEight];
    float weight[kEight];
    device::widen(x8, x);
    device::widen(dy8, d);
    device::read(a_.weight + at, weight);
    for (unsigned i = 0; i < kEight; ++i) {
      const float n = (x[i] - s_.mean) * s_.factor;
      const float g = d[i] * (weight[i] + a_.offset);
      sums.weight[i] += d[i] * n;
      means_[0] += g * n;
      if constexpr (centred) {
        sums.bias[i] += d[i];
        means_[1] += g;
      }
    }
  }
  __device__ void put(unsigned at, const Eight<T>& x8, const Eight<T>& dy8,
                      const Eight<T>& residual8) const {
    float x[kEight];
    float d[kEight];
    float weight[kEight];
    float residual[kEight];
    device::widen(x8, x);
    device::widen(dy8, d);
    device::widen(residual8, residual);
    device::read(a_.weight + at, weight);
    float mean_g = 0.0F;
    if constexpr (centred) mean_g = means_[1];
    for (unsigned i = 0; i < kEight; ++i) {
      const float n = (x[i] - s_.mean) * s_.factor;
      d[i] = residual[i] + formulas::norm_derivative(d[i] * (weight[i] + a_.offset), n, mean_g,
                                                     means_[0], s_.factor);
    }
    device::write(d, a_.dx + start_ + at);
  }

  const NormBackward<T>& a_;
  const RowShare<fit, held>& share_;
  const T* x_;
  std::size_t start_;  ///< start of the row in dy, residual and dx
  RowStatistics s_ = {};
  float means_[centred ? 2 : 1] = {};  ///< means of g * n and of g
};

/// Adds the sums of a block's warps in the order of the warps, and writes them to `own`.
template <bool centred>
__device__ void leave_sums_of_warps(const RowShare<RowFit::warp, kHeldByLane>& share,
                                    Sums<centred> (&sums)[kHeldByLane], float* own,
                                    std::size_t width) {
  alignas(16) __shared__ float so_far[(centred ? 2 : 1) * kNarrow];
  const unsigned warp = threadIdx.x / kWarp;
  for (unsigned turn = 0; turn < kRowsOfBlock; ++turn) {
    if (warp == turn) {
      share.each_held([&](unsigned k, unsigned at) {
        if (turn > 0) sums[k].add(so_far + at, kNarrow);
        if (turn + 1 < kRowsOfBlock) {
          sums[k].put(so_far + at, kNarrow);
        } else {
          sums[k].put(own + at, width);
        }
      });
    }
    __syncthreads();
  }
}

/// Each team processes every count()-th row. A block writes the sums over its rows to `partials`.
template <bool centred, RowFit fit, unsigned held, class T>
__global__ void __launch_bounds__(fit == RowFit::warp ? kRowsOfBlock * kWarp : kMaxThreads,
                                  fit == RowFit::block && held == 1 && sizeof(T) == 2 ? 2 : 1)
    norm_backward_rows(NormBackward<T> a) {
  using Row = BackwardRow<centred, fit, held, T>;
  Team<fit> team;
  const std::size_t width = a.rows.width;
  const RowShare<fit, held> share(team, static_cast<unsigned>(width));
  float* const own = a.partials + blockIdx.x * width * (centred ? 2 : 1);
  Sums<centred> sums[held];
  HeldRow<held, T> next;
  std::size_t row = team.number();
  if (kAhead<held, T> && row < a.rows.count) Row(a, share, row).keep(next);
  for (bool first = true; row < a.rows.count; first = false) {
    if (!kAhead<held, T>) Row(a, share, row).keep(next);
    const HeldRow<held, T> now = next;
    const std::size_t next_row = row + team.count();
    if (kAhead<held, T> && next_row < a.rows.count) Row(a, share, next_row).keep(next);
    Row(a, share, row).run(team, now, sums, own, first);
    row = next_row;
  }
  if constexpr (fit == RowFit::warp) {
    leave_sums_of_warps(share, sums, own, width);
  } else {
    share.each_held([&](unsigned k, unsigned at) { sums[k].put(own + at, width); });
  }
}

/// Selects the kernel for rows that need a whole block, and its number of threads.
template <bool centred, class T>
cudaError_t launch_blocks(device::LaunchConfig how, const NormBackward<T>& a) {
  const std::size_t width = a.rows.width;
  const auto launch = [&](unsigned held, void (*kernel)(NormBackward<T>)) {
    how.threads = threads_of_row(width, held);
    return device::launch(how, kernel, a);
  };
  if (keeps(width, 1)) return launch(1, &norm_backward_rows<centred, RowFit::block, 1, T>);
  if (keeps(width, 2)) return launch(2, &norm_backward_rows<centred, RowFit::block, 2, T>);
  if constexpr (sizeof(T) == 2) {  // only 16-bit types leave enough registers
    if (keeps(width, 4)) return launch(4, &norm_backward_rows<centred, RowFit::block, 4, T>);
  }
  return launch(1, &norm_backward_rows<centred, RowFit::beyond, 1, T>);
}

template <bool centred, class T>
cudaError_t launch_norm_backward(device::LaunchConfig how, const NormBackward<T>& a) {
  if (a.rows.width > kNarrow) return launch_blocks<centred>(how, a);
  how.threads = kRowsOfBlock * kWarp;
  return device::launch(how, &norm_backward_rows<centred, RowFit::warp, kHeldByLane, T>, a);
}

}  // namespace

template <class T>
cudaError_t norm_backward(cudaStream_t stream, const T* x, const T* weight, const T* dy,
                          float epsilon, const T* residual, T* dx, float* weight_gradient,
                          float* bias_gradient, float* partials, Rows rows, const NormRows& places,
                          float offset, bool centred) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  const NormBackward<T> a = {x,        weight,  dy,     residual, dx,
                             partials, epsilon, offset, rows,     places_of(places, rows)};
  const std::size_t together = rows.width <= kNarrow ? kRowsOfBlock : 1;
  const std::size_t groups = std::min((rows.count + together - 1) / together, kMaxGroups);
  const device::LaunchConfig how = {.stream = stream, .blocks = static_cast<unsigned>(groups)};
  centred = centred || bias_gradient != nullptr;
  const cudaError_t code =
      centred ? launch_norm_backward<true>(how, a) : launch_norm_backward<false>(how, a);
  if (code != cudaSuccess) return code;
  return add_partials(stream, {partials, groups, rows.width, centred}, weight_gradient,
                      bias_gradient);
}

template cudaError_t norm_backward(cudaStream_t, const float*, const float*, const float*, float,
                                   const float*, float*, float*, float*, float*, Rows,
                                   const NormRows&, float, bool);
template cudaError_t norm_backward(cudaStream_t, const Bf16*, const Bf16*, const Bf16*, float,
                                   const Bf16*, Bf16*, float*, float*, float*, Rows,
                                   const NormRows&, float, bool);
template cudaError_t norm_backward(cudaStream_t, const F16*, const F16*, const F16*, float,
                                   const F16*, F16*, float*, float*, float*, Rows, const NormRows&,
                                   float, bool);

}  // namespace ballast::model::cuda
