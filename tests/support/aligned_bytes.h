#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "ballast/core/memory.h"
#include "ballast/core/random.h"

namespace ballast::test {

/// Zeroed memory aligned to a page, fit for direct I/O.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t size)
      : bytes_(new (std::align_val_t{kPage}) std::byte[size]()), size_(size) {}
  /// Fills the memory with bytes that depend on `seed`.
  AlignedBytes(std::size_t size, std::uint64_t seed) : AlignedBytes(size) {
    for (std::size_t i = 0; i < size; ++i) {
      bytes_[i] = static_cast<std::byte>(random_u64(seed, i / 8) >> (i % 8 * 8));
    }
  }

  [[nodiscard]] HostBytes view() const { return {bytes_.get(), size_}; }
  [[nodiscard]] HostBytes view(std::size_t offset, std::size_t size) const {
    return view().subspan(offset, size);
  }

 private:
  struct Release {
    void operator()(std::byte* bytes) const { operator delete[](bytes, std::align_val_t{kPage}); }
  };
  std::unique_ptr<std::byte[], Release> bytes_;
  std::size_t size_;
};

}  // namespace ballast::test
