#pragma once

#include <cstddef>
#include <span>

#include "ballast/core/units.h"

namespace ballast {

/// A non-owning range of `T` in host memory.
template <class T>
using HostView = std::span<T>;

/// A non-owning range of `T` in device memory. Does not convert to or from HostView, because the
/// host cannot dereference GPU pointers. `raw()` is for the devices' own code.
template <class T>
class DeviceView {
 public:
  constexpr DeviceView() = default;
  constexpr DeviceView(T* data, std::size_t size) : data_(data), size_(size) {}

  [[nodiscard]] constexpr std::size_t size() const { return size_; }
  [[nodiscard]] constexpr bool empty() const { return size_ == 0; }
  [[nodiscard]] constexpr T* raw() const { return data_; }
  /// Elements [offset, offset + count). Not checked against size().
  [[nodiscard]] constexpr DeviceView subview(std::size_t offset, std::size_t count) const {
    return {data_ + offset, count};
  }
  constexpr operator DeviceView<const T>() const { return {data_, size_}; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

using HostBytes = HostView<std::byte>;
using DeviceBytes = DeviceView<std::byte>;
using ConstHostBytes = HostView<const std::byte>;
using ConstDeviceBytes = DeviceView<const std::byte>;

/// Typed view of host bytes; `bytes` must be aligned for T and a whole number of T.
template <class T>
HostView<T> view_as(HostBytes bytes) {
  return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
}

template <class T>
DeviceView<T> view_as(DeviceBytes bytes) {
  return {reinterpret_cast<T*>(bytes.raw()), bytes.size() / sizeof(T)};
}

template <class T>
DeviceView<const T> view_as(ConstDeviceBytes bytes) {
  return {reinterpret_cast<const T*>(bytes.raw()), bytes.size() / sizeof(T)};
}

}  // namespace ballast
