#include "src/model/cuda/rows/row_team.h"
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

template <bool centred, Fit fit, unsigned held, class T>
__global__ void __launch_bounds__(kMostThreads) norm_rows(NormForward<T> a) {
  Team<fit> team;
  const std::size_t row = team.number();
  if (row >= a.rows.count) return;  // the whole team returns
  const auto width = static_cast<unsigned>(a.rows.width);
  const Share<fit, held> share(team, width);
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
    if constexpr (centred) device::read(a.bias + at, bias);
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
                          &norm_rows<centred, Fit::warp, kHeldByLane, T>, a);
  }
  const unsigned held = keeps(width, 1) ? 1 : keeps(width, 2) ? 2 : 4;
  return device::launch({.stream = stream, .blocks = rows, .threads = threads_of_row(width, held)},
                        held == 1         ? &norm_rows<centred, Fit::block, 1, T>
                        : held == 2       ? &norm_rows<centred, Fit::block, 2, T>
                        : keeps(width, 4) ? &norm_rows<centred, Fit::block, 4, T>
                                          : &norm_rows<centred, Fit::beyond, 4, T>,
                        a);
}

}  // namespace

template <class T>
cudaError_t norm(cudaStream_t stream, const T* x, const T* weight, const T* bias, float epsilon,
                 const T* residual, T* y, Rows rows, const NormRows& places, float offset) {
  if (rows.count == 0 || rows.width == 0) return cudaSuccess;
  const NormForward<T> a = {
      x, weight, bias, residual, y, epsilon, offset, rows, places_of(places, rows)};
  return bias != nullptr ? launch_norm<true>(stream, a) : launch_norm<false>(stream, a);
}

template cudaError_t norm(cudaStream_t, const float*, const float*, const float*, float,
                          const float*, float*, Rows, const NormRows&, float);
template cudaError_t norm(cudaStream_t, const Bf16*, const Bf16*, const Bf16*, float, const Bf16*,
                          Bf16*, Rows, const NormRows&, float);
template cudaError_t norm(cudaStream_t, const F16*, const F16*, const F16*, float, const F16*, F16*,
                          Rows, const NormRows&, float);

}  // namespace ballast::model::cuda
