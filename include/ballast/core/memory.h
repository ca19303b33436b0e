#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>
#include <utility>

#include "ballast/core/dtype.h"
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
  /// A view of constants converts from one of values.
  template <class U>
  requires std::same_as<const U, T>
  constexpr DeviceView(DeviceView<U> other) : DeviceView(other.raw(), other.size()) {}

  [[nodiscard]] constexpr std::size_t size() const { return size_; }
  [[nodiscard]] constexpr bool empty() const { return size_ == 0; }
  [[nodiscard]] constexpr T* raw() const { return data_; }
  /// Elements [offset, offset + count). Not checked against size().
  [[nodiscard]] constexpr DeviceView subview(std::size_t offset, std::size_t count) const {
    return {data_ + offset, count};
  }

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

/// Allocates consecutive, aligned parts of whole cache lines from memory that it does not own.
/// Without memory it only counts bytes. It does not check for the end of the memory.
class Bump {
 public:
  /// `base`: aligned to the largest alignment that take() is called with.
  explicit Bump(std::byte* base = nullptr) : base_(base) {}

  /// Returns `count` elements, or nullptr without memory. `alignment`: bytes, at least a cache
  /// line.
  template <class T>
  T* take(std::size_t count, std::size_t alignment = kCacheLine) {
    used_ = round_up(used_, alignment);
    std::byte* const start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * sizeof(T), kCacheLine);
    return reinterpret_cast<T*>(start);
  }
  /// Bytes from the beginning to the end of the last part.
  [[nodiscard]] Bytes used() const { return used_; }

 private:
  std::byte* base_;
  Bytes used_ = 0;
};

/// Owns private anonymous memory. Address space is reserved at once; zeroed pages, huge ones if the
/// kernel provides them, are allocated on first write.
class Mapping {
 public:
  Mapping() = default;
  /// Maps `bytes` rounded up to whole pages, aligned to kPage. Throws Error(memory) with `what`.
  Mapping(Bytes bytes, std::string_view what);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  /// The whole mapping; empty when moved from.
  [[nodiscard]] HostBytes bytes() const { return bytes_; }

 private:
  HostBytes bytes_;
};

/// Owns an open file descriptor, or none (-1). Move-only; closes in the destructor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  [[nodiscard]] int number() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }

 private:
  int number_ = -1;
};

/// Converts values stored as `type` in `bytes` exactly to fp32. `bytes` has out.size() values and
/// may have any alignment.
void decode(ConstHostBytes bytes, DType type, std::span<float> out);

/// Stores `values` as `type`: bf16 and f16 are rounded to nearest, ties to even. `out` has room for
/// all of them and may have any alignment.
void encode(std::span<const float> values, DType type, HostBytes out);

}  // namespace ballast
