#pragma once

#include "src/device/cuda/eight.h"

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

using device::widen;
template <class T>
__device__ inline T narrow(float value) {
  T narrowed;
  device::narrow(value, narrowed);
  return narrowed;
}

}  // namespace ballast::model::cuda
