#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

#include "ballast/core/random.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::state::test {

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
    for (std::size_t i = 0; i < bytes_; ++i) {
      data_[i] = static_cast<std::byte>(random_u64(seed, i / 8) >> (i % 8 * 8));
    }
  }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ && std::equal(data_, data_ + bytes_, other.data_);
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

}  // namespace ballast::state::test
