#pragma once

#include "ballast/core/dtype.h"

#include "src/device/cuda/kernel_language.h"

namespace ballast::model::cuda {

/// Elements that a thread reads or writes in one access of 16 bytes.
template <class T>
struct alignas(16) Pack {
  static constexpr unsigned kCount = 16 / sizeof(T);
  T values[kCount];
};

template <class T>
__device__ inline Pack<T> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T>*>(from);
}
template <class T>
__device__ inline void store_pack(T* to, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(Bf16 value) {
  return to_float(value);
}
template <class T>
__device__ T narrow(float value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
    return to_bf16(value);
  }
}

}  // namespace ballast::model::cuda
