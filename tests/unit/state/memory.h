#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "ballast/core/memory.h"
#include "ballast/core/random.h"
#include "ballast/core/units.h"

namespace ballast::test {

/// Page-aligned host memory.
class Memory {
 public:
  explicit Memory(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kPage}))),
        bytes_(bytes) {}
  ~Memory() { ::operator delete (data_, std::align_val_t{kPage}); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] HostBytes view() const { return {data_, bytes_}; }
  void fill(std::uint64_t seed) const {
    for (std::size_t i = 0; i < bytes_; i += 8) {
      const std::uint64_t value = random_u64(seed, i / 8);
      std::memcpy(data_ + i, &value, std::min<std::size_t>(8, bytes_ - i));
    }
  }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, bytes_) == 0;
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

}  // namespace ballast::test
