#include "ballast/core/memory.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast {

Mapping::Mapping(Bytes bytes, std::string_view what) {
  if (bytes == 0) return;
  const Bytes size = round_up(bytes, kPage);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorCategory::memory, std::string(what) + ": cannot map " + format_bytes(size),
                errno);
  }
  // Huge pages are optional; they affect only speed.
  static_cast<void>(madvise(memory, size, MADV_HUGEPAGE));
  bytes_ = {static_cast<std::byte*>(memory), size};
}

Mapping::~Mapping() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

namespace {

template <class T>
void decode_as(ConstHostBytes bytes, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    out[i] = to_float(value);
  }
}

template <class T>
void encode_as(std::span<const float> values, HostBytes out) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T value = from_float<T>(values[i]);
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

void decode(ConstHostBytes bytes, DType type, std::span<float> out) {
  expects(bytes.size() == out.size() * size_of(type), "decode: the sizes differ");
  switch (type) {
    case DType::f32:
      if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
      return;
    case DType::bf16:
      return decode_as<Bf16>(bytes, out);
    case DType::f16:
      return decode_as<F16>(bytes, out);
  }
}

void encode(std::span<const float> values, DType type, HostBytes out) {
  expects(out.size() == values.size() * size_of(type), "encode: the sizes differ");
  switch (type) {
    case DType::f32:
      if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
      return;
    case DType::bf16:
      return encode_as<Bf16>(values, out);
    case DType::f16:
      return encode_as<F16>(values, out);
  }
}

}  // namespace ballast
