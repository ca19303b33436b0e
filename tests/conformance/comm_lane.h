#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/device/device.h"

namespace ballast::comm::comm_test {

using Content = std::vector<std::byte>;

class World : public testing::Environment {
 public:
  static Ranks& ranks() { return *instance_->ranks_; }
  void SetUp() override {
    // Parts of an all_to_all need several messages.
    ranks_ = join_ranks(read_launch(), {.timeout_seconds = 100.0, .largest_message = 50001});
    instance_ = this;
  }
  void TearDown() override { ranks_.reset(); }

 private:
  inline static World* instance_ = nullptr;
  std::unique_ptr<Ranks> ranks_;
};
/// Input of rank `rank`: elements of many magnitudes, so that a different order of a sum is
/// detected.
inline Content content_of(std::uint32_t rank, Bytes bytes, DType type, std::uint32_t seed) {
  std::mt19937 random(1000 * seed + rank);
  Content content(bytes);
  for (Bytes at = 0; at < bytes; at += size_of(type)) {
    const double unit = static_cast<double>(random()) * 0x1p-31 - 1.0;
    const auto value = static_cast<float>(std::ldexp(unit, static_cast<int>(random() % 24U)));
    const Bf16 rounded = to_bf16(value);
    std::memcpy(content.data() + at,
                type == DType::f32 ? static_cast<const void*>(&value) : &rounded, size_of(type));
  }
  return content;
}

inline float element(const Content& content, Bytes at, DType type) {
  if (type == DType::f32) {
    float value = 0.0F;
    std::memcpy(&value, content.data() + at, 4);
    return value;
  }
  Bf16 value;
  std::memcpy(&value, content.data() + at, 2);
  return to_float(value);
}

inline Content slice(const Content& content, Bytes offset, Bytes bytes) {
  const auto begin = content.begin() + static_cast<std::ptrdiff_t>(offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(bytes)};
}

inline std::string device_kind() {
  const char* const kind = std::getenv("BALLAST_TEST_DEVICE");
  return kind == nullptr ? "host" : kind;
}

/// One channel with its stream and memory.
class Lane {
 public:
  explicit Lane(const char* name, const std::vector<std::uint32_t>& members = {})
      : device(device::make_device({.kind = device_kind(),
                                    .budget = 256 * kMiB,
                                    .compute_threads = 1,
                                    .local_rank = World::ranks().launch().local_rank})),
        stream(device->make_stream(name)),
        channel(World::ranks().make_channel(*device, members)) {}

  void fill(DeviceBytes to, const Content& content) const {
    device->copy_to_device(*stream, to, content);
    stream->synchronize();
  }
  DeviceBytes filled(const Content& content) const {
    const DeviceBytes made = device->allocate(content.size(), "test");
    fill(made, content);
    return made;
  }
  /// Scratch memory, followed by a page that must not change.
  DeviceBytes scratch(Bytes pages) const {
    return filled(Content((pages + 1) * kPage, std::byte{0x5a})).subview(0, pages * kPage);
  }
  bool guard_holds(DeviceBytes scratch) const {
    const Content guard = read({scratch.raw() + scratch.size(), kPage});
    return std::ranges::all_of(guard, [](std::byte byte) { return byte == std::byte{0x5a}; });
  }
  Content read(DeviceBytes bytes) const {
    Content content(bytes.size());
    device->copy_to_host(*stream, content, bytes);
    stream->synchronize();
    return content;
  }

  std::unique_ptr<device::Device> device;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<Communicator> channel;
};

/// Guarantees for every device and every number of ranks.
class Comm : public testing::Test {
 protected:
  void SetUp() override {
    if (device_kind() == "host") return;
    if (const std::string refusal = device::cuda_refusal(); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
  }
};

}  // namespace ballast::comm::comm_test
