#include <algorithm>
#include <cmath>
#include <cstdint>

#include "src/device/cuda/eight_values.h"
#include "src/device/cuda/kernel_language.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

using device::Eight;
using device::kEight;
using device::kWarp;

constexpr unsigned kRotationThreads = 256;
/// Heads that a thread rotates by the same angles, which it reads once.
constexpr std::size_t kTogether = 4;

/// Some frequencies of a Rotary as a kernel argument.
struct Frequencies {
  double values[kMaxPairs];
  double of_long_documents[kMaxPairs];
  std::size_t first;  ///< number of the first pair
  std::size_t count;
  std::size_t pairs;  ///< pairs of the whole head
  double factor;
  double trained_length;
  double growth;
  double slope;
  double period;
};

__global__ void find_angles(Frequencies frequencies, AngleRows rows, float* cosine, float* sine) {
  const std::size_t at = std::size_t{blockIdx.x} * kRotationThreads + threadIdx.x;
  if (at >= rows.count * frequencies.count) return;
  const std::size_t row = at / frequencies.count;
  const std::size_t place = at % frequencies.count;
  const std::size_t pair = frequencies.first + place;
  double frequency = frequencies.values[place];
  if (rows.by_document) {
    const std::size_t tokens = document_length(rows.positions, row, rows.length);
    const double ratio = static_cast<double>(tokens) / frequencies.trained_length;
    if (ratio > 1.0) {
      frequency = frequency_in(ratio, frequencies.of_long_documents[place], frequencies.growth,
                               pair, frequencies.pairs);
    }
  }
  const double position = rows.positions == nullptr ? static_cast<double>(row % rows.length)
                                                    : static_cast<double>(rows.positions[row]);
  const double angle = position * frequency;
  const double factor =
      factor_at(position, frequencies.factor, frequencies.slope, frequencies.period);
  const std::size_t to = row * frequencies.pairs + pair;
  cosine[to] = static_cast<float>(std::cos(angle) * factor);
  sine[to] = static_cast<float>(std::sin(angle) * factor);
}

/// Returns the offset of the angles for this block's row.
__device__ std::size_t first_angle(const Rotation& rotation) {
  const std::size_t row = blockIdx.x;
  const std::size_t position = rotation.positions == nullptr
                                   ? row % rotation.length
                                   : static_cast<std::size_t>(rotation.positions[row]);
  return position * rotation.half;
}

/// Rotates `count` pairs (a[i], b[i]).
template <unsigned count>
__device__ void turn(float (&a)[count], float (&b)[count], const float (&cosine)[count],
                     const float (&sine)[count]) {
  for (unsigned i = 0; i < count; ++i) {
    const float first = formulas::rotate_first(a[i], b[i], cosine[i], sine[i]);
    b[i] = formulas::rotate_second(a[i], b[i], cosine[i], sine[i]);
    a[i] = first;
  }
}

/// There is one block per row. A thread has eight neighbouring pairs of kTogether heads and reads
/// all of them before it writes any.
template <class T>
__global__ void turn_eights(T* x, std::size_t stride, Rotation rotation) {
  const std::size_t half = rotation.half;
  const std::size_t parts = half / kEight;
  const std::size_t pieces = (rotation.heads + kTogether - 1) / kTogether * parts;
  T* const row = x + blockIdx.x * stride;
  const std::size_t angles = first_angle(rotation);
  for (std::size_t piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    const std::size_t column = piece % parts * kEight;
    const std::size_t head = piece / parts * kTogether;
    T* const from = row + head * rotation.head_dim + column;
    Eight<T> first[kTogether];
    Eight<T> second[kTogether];
    for (std::size_t k = 0; k < kTogether; ++k) {
      if (head + k >= rotation.heads) continue;
      first[k] = device::read(from + k * rotation.head_dim);
      second[k] = device::read(from + k * rotation.head_dim + half);
    }
    float cosine[kEight];
    float sine[kEight];
    device::read(rotation.cosine + angles + column, cosine);
    device::read(rotation.sine + angles + column, sine);
    for (float& value : sine) value *= rotation.direction;
    for (std::size_t k = 0; k < kTogether; ++k) {
      if (head + k >= rotation.heads) continue;
      float a[kEight];
      float b[kEight];
      device::widen(first[k], a);
      device::widen(second[k], b);
      turn(a, b, cosine, sine);
      device::write(a, from + k * rotation.head_dim);
      device::write(b, from + k * rotation.head_dim + half);
    }
  }
}

/// Variant for pairs of neighbours, and for a half, heads or a start of the first head that are not
/// a multiple of eight: one pair at a time.
template <class T>
__global__ void turn_pairs(T* x, std::size_t stride, Rotation rotation) {
  const std::size_t half = rotation.half;
  const std::size_t angles = first_angle(rotation);
  for (std::size_t pair = threadIdx.x; pair < rotation.heads * half; pair += blockDim.x) {
    const std::size_t column = pair % half;
    const std::size_t apart = rotation.interleaved ? 1 : half;
    T* const from = x + blockIdx.x * stride + pair / half * rotation.head_dim +
                    (rotation.interleaved ? 2 * column : column);
    float a[1] = {device::widen(from[0])};
    float b[1] = {device::widen(from[apart])};
    const float cosine[1] = {rotation.cosine[angles + column]};
    const float sine[1] = {rotation.sine[angles + column] * rotation.direction};
    turn(a, b, cosine, sine);
    device::narrow(a[0], from[0]);
    device::narrow(b[0], from[apart]);
  }
}

Frequencies frequencies_of(const Rotary& rotary, std::size_t first, std::size_t count) {
  Frequencies some = {.values = {},
                      .of_long_documents = {},
                      .first = first,
                      .count = count,
                      .pairs = rotary.frequencies.size(),
                      .factor = rotary.factor,
                      .trained_length = rotary.trained_length,
                      .growth = rotary.growth,
                      .slope = rotary.slope,
                      .period = rotary.period};
  std::copy_n(rotary.frequencies.begin() + static_cast<std::ptrdiff_t>(first), count, some.values);
  if (!rotary.long_frequencies.empty()) {
    std::copy_n(rotary.long_frequencies.begin() + static_cast<std::ptrdiff_t>(first), count,
                some.of_long_documents);
  }
  return some;
}

}  // namespace

cudaError_t fill_angles(cudaStream_t stream, const Rotary& rotary, const AngleRows& rows,
                        float* cosine, float* sine) {
  const std::size_t pairs = rotary.frequencies.size();
  if (rows.count == 0) return cudaSuccess;
  for (std::size_t first = 0; first < pairs; first += kMaxPairs) {
    const Frequencies some = frequencies_of(rotary, first, std::min(kMaxPairs, pairs - first));
    const std::size_t size = rows.count * some.count;
    const cudaError_t code = device::launch(
        {.stream = stream,
         .blocks = static_cast<unsigned>((size + kRotationThreads - 1) / kRotationThreads),
         .threads = kRotationThreads},
        &find_angles, some, rows, cosine, sine);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

template <class T>
cudaError_t rotate(cudaStream_t stream, T* x, std::size_t stride, const Rotation& rotation,
                   Rows rows) {
  const std::size_t half = rotation.half;
  if (rows.count == 0 || rotation.heads * half == 0) return cudaSuccess;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x) % (kEight * sizeof(T)) == 0;
  const bool eights =
      aligned && !rotation.interleaved && half % kEight == 0 && rotation.head_dim % kEight == 0;
  const std::size_t pieces = eights ? (rotation.heads + kTogether - 1) / kTogether * (half / kEight)
                                    : rotation.heads * half;
  const std::size_t warps =
      std::min<std::size_t>((pieces + kWarp - 1) / kWarp, kRotationThreads / kWarp);
  return device::launch({.stream = stream,
                         .blocks = static_cast<unsigned>(rows.count),
                         .threads = static_cast<unsigned>(warps * kWarp)},
                        eights ? &turn_eights<T> : &turn_pairs<T>, x, stride, rotation);
}

template cudaError_t rotate(cudaStream_t, float*, std::size_t, const Rotation&, Rows);
template cudaError_t rotate(cudaStream_t, Bf16*, std::size_t, const Rotation&, Rows);
template cudaError_t rotate(cudaStream_t, F16*, std::size_t, const Rotation&, Rows);

}  // namespace ballast::model::cuda
