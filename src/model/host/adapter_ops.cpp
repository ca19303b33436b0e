#include "src/model/host/adapter_ops.h"

#include <algorithm>

#include "ballast/core/dtype.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Granularity of a thread's elements: whole cache lines of any type, and groups of the mask.
constexpr std::size_t kMaskStep = 64;

float widen(float value) {
  return value;
}
float widen(Bf16 value) {
  return to_float(value);
}
void narrow(float from, float& to) {
  to = from;
}
void narrow(float from, Bf16& to) {
  to = to_bf16(from);
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
        const float before = add_to_y ? widen(y[at + i]) : 0.0F;
        narrow(before + widen(x[at + i]) * factors[i], y[at + i]);
      }
    }
  });
}

template class AdapterOps<float>;
template class AdapterOps<Bf16>;

}  // namespace ballast::model::host
