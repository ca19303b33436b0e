#include "src/model/host/adapter_ops.h"

#include <algorithm>

#include "ballast/core/dtype.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Granularity of a thread's elements: whole cache lines of any type, and groups of the mask.
constexpr std::size_t kMaskStep = 64;

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

template class AdapterOps<float>;
template class AdapterOps<Bf16>;
template class AdapterOps<F16>;

}  // namespace ballast::model::host
