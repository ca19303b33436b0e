// Limits of shared memory for kernels, on a fake of the CUDA runtime.
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "src/device/cuda/shared_memory.h"
#include "tests/support/fake_cuda.h"

namespace ballast::device::cuda_shared_memory_test {
namespace {

using test::FakeCuda;

constexpr std::size_t kMuch = kFreelyShared + 1;

/// Each test has its own kernels, because a kernel's limit lasts as long as the program.
class SharedMemory : public testing::Test {
 protected:
  void SetUp() override {
    cudaSetDevice(0);
    FakeCuda::shared_memory_calls = 0;
    FakeCuda::most_shared_memory = SIZE_MAX;
  }
  void TearDown() override {
    cudaSetDevice(0);
    FakeCuda::most_shared_memory = SIZE_MAX;
  }
};

TEST_F(SharedMemory, IsAskedForOncePerKernelAndDevice) {
  static const int kernels[2] = {};
  for (int turn = 0; turn < 3; ++turn) {
    for (const int& kernel : kernels) {
      for (const int ordinal : {0, 1}) {
        ASSERT_EQ(cudaSetDevice(ordinal), cudaSuccess);
        EXPECT_EQ(allow_shared_memory(&kernel, kMuch), cudaSuccess);
        EXPECT_EQ(allow_shared_memory(&kernel, kMuch - 1), cudaSuccess);
      }
    }
    EXPECT_EQ(FakeCuda::shared_memory_calls, 4);
  }
}

TEST_F(SharedMemory, ThatEveryKernelMayHaveIsNotAskedFor) {
  static const int kernel = 0;
  EXPECT_EQ(allow_shared_memory(&kernel, kFreelyShared), cudaSuccess);
  EXPECT_EQ(FakeCuda::shared_memory_calls, 0);
}

TEST_F(SharedMemory, IsAskedForAgainWhenItIsMore) {
  static const int kernel = 0;
  for (const std::size_t bytes : {kMuch, 2 * kMuch, kMuch, 2 * kMuch}) {
    EXPECT_EQ(allow_shared_memory(&kernel, bytes), cudaSuccess);
  }
  EXPECT_EQ(FakeCuda::shared_memory_calls, 2);
}

TEST_F(SharedMemory, ThatWasRefusedIsRefusedAgain) {
  static const int kernel = 0;
  FakeCuda::most_shared_memory = 2 * kMuch - 1;
  EXPECT_EQ(allow_shared_memory(&kernel, kMuch), cudaSuccess);
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(allow_shared_memory(&kernel, 2 * kMuch), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  }
  EXPECT_EQ(FakeCuda::shared_memory_calls, 3);
}

TEST_F(SharedMemory, IsAllowedOnADeviceWhileAnotherOneIsWaitedFor) {
  static const int kernel = 0;
  FakeCuda::shared_memory_waits_on = 0;
  std::jthread busy([] { EXPECT_EQ(allow_shared_memory(&kernel, kMuch), cudaSuccess); });
  while (FakeCuda::shared_memory_calls == 0) std::this_thread::yield();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(allow_shared_memory(&kernel, kMuch), cudaSuccess);
  busy.join();
  EXPECT_EQ(FakeCuda::shared_memory_waits_on, -1) << "the second call waited for the first one";
  FakeCuda::shared_memory_waits_on = -1;
}

TEST_F(SharedMemory, IsAskedForOnceByManyThreads) {
  static const int kernels[8] = {};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (const int& kernel : kernels) {
          EXPECT_EQ(allow_shared_memory(&kernel, kMuch), cudaSuccess);
        }
      });
    }
  }
  EXPECT_EQ(FakeCuda::shared_memory_calls, 8);
}

}  // namespace
}  // namespace ballast::device::cuda_shared_memory_test
