#include "ballast/device/plain_copies.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "ballast/core/mapping.h"

#include "src/device/factories.h"

namespace ballast::device {
namespace {

/// Copies between two buffers, because the memory of the host device is ordinary memory.
class Memcpy {
 public:
  explicit Memcpy(Bytes bytes)
      : bytes_(bytes), from_(bytes, "plain copies"), to_(bytes, "plain copies") {
    // Unwritten pages would all be read from one page of zeros.
    std::fill(from_.bytes().begin(), from_.bytes().end(), std::byte{1});
    std::fill(to_.bytes().begin(), to_.bytes().end(), std::byte{2});
  }

  void run(std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(to_.bytes().data(), from_.bytes().data(), bytes_);
    }
  }

 private:
  Bytes bytes_;
  Mapping from_;
  Mapping to_;
};

class HostPlainCopies final : public PlainCopies {
 public:
  explicit HostPlainCopies(Bytes bytes) : up_(bytes), down_(bytes) {}

  void run(CopyWay way, std::size_t count) override {
    if (way == CopyWay::up) return up_.run(count);
    if (way == CopyWay::down) return down_.run(count);
    std::thread other([&] { down_.run(count); });
    up_.run(count);
    other.join();
  }

 private:
  Memcpy up_;
  Memcpy down_;
};

}  // namespace

std::unique_ptr<PlainCopies> make_host_plain_copies(Bytes bytes) {
  return std::make_unique<HostPlainCopies>(bytes);
}

}  // namespace ballast::device
