#pragma once

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "ballast/device/device.h"

namespace ballast::test {

/// The device for tests that any device can run: BALLAST_TEST_DEVICE, or the host device.
inline std::string device_kind() {
  const char* const kind = std::getenv("BALLAST_TEST_DEVICE");
  return kind == nullptr ? "host" : kind;
}

/// True without a GPU: the kernels of the CUDA device run thread by thread on the host, which is
/// slow.
inline bool is_emulated() {
  return device_kind() == "cuda" && std::getenv("BALLAST_FAKE_SEED") != nullptr;
}

/// Skips all tests of a program if there is no such device.
class NeedsDevice : public testing::Environment {
 public:
  void SetUp() override {
    if (device_kind() != "cuda") return;
    if (const std::string refusal = device::cuda_refusal(); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
  }
};
inline const auto* const kNeedsDevice = testing::AddGlobalTestEnvironment(new NeedsDevice);

}  // namespace ballast::test
