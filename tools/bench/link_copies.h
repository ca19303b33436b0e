#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/device/device.h"
#include "ballast/memory/ledger.h"

namespace ballast::tools {

/// Copies of one size through a device, as in a run: from and to a pinned pool, with a stream for
/// each direction.
class LinkCopies {
 public:
  /// `user`: the command, for messages.
  LinkCopies(const std::string& kind, Bytes bytes, std::string user)
      : bytes_(bytes),
        user_(std::move(user)),
        device_(device::make_device(
            {.kind = kind, .budget = 2 * round_up(bytes, kPage), .compute_threads = 1})),
        pool_(2 * round_up(bytes, kPage)),
        pin_(device_->pin(pool_.memory(), "--bytes")),
        source_(pool_.allocate(bytes, "upload")),
        sink_(pool_.allocate(bytes, "offload")),
        up_place_(device_->allocate(bytes, "upload")),
        down_place_(device_->allocate(bytes, "offload")),
        up_(device_->make_stream("upload")),
        down_(device_->make_stream("offload")) {
    // Touch all pages, with different contents.
    fill(sink_, 1);
    device_->copy_to_device(*up_, down_place_, sink_);
    up_->synchronize();
    fill(source_, 2);
  }

  [[nodiscard]] device::Device& device() { return *device_; }
  /// Bytes of host memory that are pinned.
  [[nodiscard]] Bytes pinned() const { return pin_->bytes(); }

  /// Runs `count` copies and waits.
  void run(device::CopyWay way, std::size_t count) {
    using device::CopyWay;
    for (std::size_t i = 0; i < count; ++i) {
      if (way != CopyWay::down) device_->copy_to_device(*up_, up_place_, source_);
      if (way != CopyWay::up) device_->copy_to_host(*down_, sink_, down_place_);
    }
    if (way != CopyWay::down) up_->synchronize();
    if (way != CopyWay::up) down_->synchronize();
  }

  /// Throws Error(device) unless uploaded bytes come back unchanged.
  void check() {
    device_->copy_to_host(*up_, sink_, up_place_);
    up_->synchronize();
    if (std::memcmp(sink_.data(), source_.data(), bytes_) == 0) return;
    throw Error(ErrorCategory::device, fmt::format("{}: {} came back from the device changed",
                                                   user_, format_bytes(bytes_)));
  }

 private:
  static void fill(HostBytes memory, std::uint64_t key) {
    for (Bytes at = 0; at < memory.size(); at += sizeof key) {
      const std::uint64_t word = random_u64(key, at);
      std::memcpy(memory.data() + at, &word, std::min<Bytes>(sizeof word, memory.size() - at));
    }
  }

  Bytes bytes_;
  std::string user_;
  std::unique_ptr<device::Device> device_;
  memory::HostPool pool_;
  std::unique_ptr<device::Pin> pin_;
  HostBytes source_;
  HostBytes sink_;
  DeviceBytes up_place_;
  DeviceBytes down_place_;
  std::unique_ptr<device::Stream> up_;
  std::unique_ptr<device::Stream> down_;
};

}  // namespace ballast::tools
