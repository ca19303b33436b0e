// Linked into every test program for a GPU: skips all its tests on machines without one, and
// selects the CUDA device for tests that any device can run.
#include <cstdlib>

#include <gtest/gtest.h>

#include "ballast/device/device.h"

namespace ballast::test {
namespace {

class NeedsGpu : public testing::Environment {
 public:
  NeedsGpu() { setenv("BALLAST_TEST_DEVICE", "cuda", 1); }
  void SetUp() override {
    if (const std::string refusal = device::gpu_refusal({}); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
  }
};

const auto* const registered = testing::AddGlobalTestEnvironment(new NeedsGpu);

}  // namespace
}  // namespace ballast::test
