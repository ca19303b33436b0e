#include "src/model/host/adapter_ops.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ballast/core/dtype.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Threads get multiples of this many elements: whole cache lines of any type, and groups of the
/// mask.
constexpr std::size_t kMaskStep = 64;

/// Adds every sixteenth element into each of sixteen sums, for the same bits on any instruction
/// set.
template <class T>
float square_sum(const T* values, std::size_t size) {
  constexpr std::size_t kSums = 16;
  std::array<float, kSums> sums = {};
  std::size_t at = 0;
  for (; at + kSums <= size; at += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) {
      const float value = to_float(values[at + i]);
      sums[i] += value * value;
    }
  }
  for (std::size_t i = 0; at + i < size; ++i) {
    const float value = to_float(values[at + i]);
    sums[i] += value * value;
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
  return sums[0];
}

}  // namespace

template <class T>
void AdapterOps<T>::scale(T* x, float factor, std::size_t size) const {
  split(size, kMaskStep, [&](Range r) { scale_(x + r.begin, factor, x + r.begin, r.size()); });
}

template <class T>
void AdapterOps<T>::drop(const DropoutMask& mask, const T* x, T* y, std::size_t size,
                         bool add_to_y) const {
  split(size, kMaskStep, [&](Range r) {
    for (std::size_t at = r.begin; at < r.end; at += 4) {
      const auto factors = mask.factors(at / 4);
      for (std::size_t i = 0; i < std::min<std::size_t>(4, r.end - at); ++i) {
        const float before = add_to_y ? to_float(y[at + i]) : 0.0F;
        y[at + i] = from_float<T>(before + to_float(x[at + i]) * factors[i]);
      }
    }
  });
}

template <class T>
void AdapterOps<T>::compute_gains(const AdaptedRows<T>& rows, float* gains,
                                  float* inverse_norms) const {
  const std::size_t out = rows.map.out;
  split(out, kMaskStep, [&](Range r) {
    if (rows.map.flipped) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        gains[i] = square_sum(rows.map.weight + i * rows.map.in, rows.map.in);
      }
    } else {
      std::fill(gains + r.begin, gains + r.end, 0.0F);
      for (std::size_t row = 0; row < rows.map.in; ++row) {
        const T* const from = rows.map.weight + row * out;
        for (std::size_t i = r.begin; i < r.end; ++i) {
          const float value = to_float(from[i]);
          gains[i] += value * value;
        }
      }
    }
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const T* const b = rows.b + i * rows.rank;
      const float added =
          added_square([b](std::size_t k) { return to_float(b[k]); }, rows.cross + i * rows.rank,
                       rows.gram, rows.rank, rows.scale);
      const float norm = std::sqrt(std::max(gains[i] + added, 0.0F));
      inverse_norms[i] = norm > 0.0F ? 1.0F / norm : 0.0F;
      gains[i] = to_float(rows.magnitudes[i]) * inverse_norms[i];
    }
  });
}

template <class T>
void AdapterOps<T>::scale_columns(const ScaledColumns<T>& c) const {
  split(c.rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      const T* const x = c.x + row * c.x_step;
      T* const y = c.y + row * c.y_step;
      for (std::size_t i = 0; i < c.width; ++i) {
        float value = to_float(x[i]) * (c.gains == nullptr ? 1.0F : c.gains[i]);
        if (c.bias != nullptr) value += to_float(c.bias[i]);
        if (c.residual != nullptr) value += to_float(c.residual[row * c.y_step + i]);
        y[i] = from_float<T>(value);
      }
    }
  });
}

template <class T>
void AdapterOps<T>::add_column_products(const ColumnProducts<T>& c, float* gradient) const {
  split(c.width, kMaskStep, [&](Range r) {
    for (std::size_t first = r.begin; first < r.end; first += kMaskStep) {
      const std::size_t count = std::min(kMaskStep, r.end - first);
      std::array<float, kMaskStep> sums = {};
      for (std::size_t row = 0; row < c.rows; ++row) {
        const T* const x = c.x + row * c.x_step + first;
        const T* const y = c.y + row * c.y_step + first;
        for (std::size_t i = 0; i < count; ++i) sums[i] += to_float(x[i]) * to_float(y[i]);
      }
      for (std::size_t i = 0; i < count; ++i) gradient[first + i] += c.factors[first + i] * sums[i];
    }
  });
}

template class AdapterOps<float>;
template class AdapterOps<Bf16>;
template class AdapterOps<F16>;

}  // namespace ballast::model::host
