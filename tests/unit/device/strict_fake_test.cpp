// Faults that the strict fake of CUDA must see, one of each kind. Tests of other programs rely on
// it to see such faults of the program.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/device/cuda/libraries.h"
#include "src/model/cuda/products/products.h"
#include "tests/support/device_array.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"

namespace ballast::device::strict_fake_test {
namespace {

using test::DeviceArray;
using test::FakeCuda;
using test::FakeMemory;
using test::must;

constexpr std::size_t kCount = 64;
constexpr std::size_t kBytes = kCount * sizeof(float);

/// Two streams of a GPU, and memory that the host shares with it.
class StrictFake : public testing::Test {
 protected:
  StrictFake() {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    FakeCuda::seed = 5;  // a GPU whose work runs only when somebody waits
  }
  ~StrictFake() override {
    test::await_all_streams();
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    cudaFreeHost(host_);
    FakeCuda::seed = before_;
  }
  void SetUp() override {
    must(cudaSetDevice(0));
    for (auto& stream : streams_) must(cudaStreamCreateWithFlags(&stream, 0));
    void* memory = nullptr;
    must(cudaMallocHost(&memory, kBytes));
    host_ = static_cast<float*>(memory);
    std::fill_n(host_, kCount, 1.0F);
  }

  /// Adds `term` to all elements of `values` on stream `which`.
  void add(std::size_t which, float* values, float term) {
    must(test::launch_on_stream(streams_[which], &kernel_, [=] {
      for (std::size_t i = 0; i < kCount; ++i) values[i] += term;
    }));
  }
  void upload(std::size_t which, float* to) {
    must(cudaMemcpyAsync(to, host_, kBytes, cudaMemcpyHostToDevice, streams_[which]));
  }
  void download(std::size_t which, const float* from) {
    must(cudaMemcpyAsync(host_, from, kBytes, cudaMemcpyDeviceToHost, streams_[which]));
  }
  /// The first element after all work on stream 0.
  float values_after(const DeviceArray<float>& values) {
    download(0, values.data());
    must(cudaStreamSynchronize(streams_[0]));
    return host_[0];
  }
  /// Calls `work` with other seeds until its result differs from `expected`. Returns whether it
  /// did.
  bool differs(float expected, const std::function<float()>& work) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      FakeCuda::seed = seed;
      if (work() != expected) return true;
    }
    return false;
  }

  std::uint64_t before_ = FakeCuda::seed;
  std::array<cudaStream_t, 2> streams_ = {};
  float* host_ = nullptr;
  static constexpr char kernel_ = 0;  ///< its address stands for a kernel
};

TEST_F(StrictFake, SeesABufferThatIsReusedBeforeItsCopyIsDone) {
  DeviceArray<float> values(kCount);
  const auto reuse = [&](bool waits) {
    std::fill_n(host_, kCount, 1.0F);
    upload(0, values.data());
    if (waits) must(cudaStreamSynchronize(streams_[0]));
    std::fill_n(host_, kCount, 2.0F);
    return values_after(values);
  };
  EXPECT_TRUE(differs(1.0F, [&] { return reuse(false); }));
  EXPECT_FALSE(differs(1.0F, [&] { return reuse(true); }));
}

TEST_F(StrictFake, ReadsPageableMemoryAtTheCall) {
  DeviceArray<float> values(kCount);
  std::vector<float> pageable(kCount, 1.0F);
  EXPECT_FALSE(differs(1.0F, [&] {
    std::fill(pageable.begin(), pageable.end(), 1.0F);
    must(cudaMemcpyAsync(values.data(), pageable.data(), kBytes, cudaMemcpyHostToDevice,
                         streams_[0]));
    std::fill(pageable.begin(), pageable.end(), 2.0F);
    download(0, values.data());
    must(cudaStreamSynchronize(streams_[0]));
    return host_[0];
  }));
}

TEST_F(StrictFake, SeesAMissingWaitForAnEvent) {
  DeviceArray<float> values(kCount, 1.0F);
  cudaEvent_t event = nullptr;
  must(cudaEventCreate(&event));
  const auto pass = [&](bool waits) {
    std::fill_n(host_, kCount, 1.0F);
    upload(0, values.data());
    must(cudaStreamSynchronize(streams_[0]));
    add(0, values.data(), 1.0F);
    must(cudaEventRecord(event, streams_[0]));
    if (waits) must(cudaStreamWaitEvent(streams_[1], event, 0));
    download(1, values.data());
    must(cudaStreamSynchronize(streams_[1]));
    const float found = host_[0];
    must(cudaStreamSynchronize(streams_[0]));
    return found;
  };
  EXPECT_TRUE(differs(2.0F, [&] { return pass(false); }));
  EXPECT_FALSE(differs(2.0F, [&] { return pass(true); }));
  must(cudaEventDestroy(event));
}

TEST_F(StrictFake, SeesTheHostThatReadsAResultTooEarly) {
  DeviceArray<float> values(kCount, 3.0F);
  EXPECT_TRUE(differs(3.0F, [&] {
    std::fill_n(host_, kCount, 1.0F);
    download(0, values.data());
    const float found = host_[0];
    must(cudaStreamSynchronize(streams_[0]));
    return found;
  }));
}

TEST_F(StrictFake, MemoryThatNobodyFilledIsNotANumber) {
  void* memory = nullptr;
  must(cudaMalloc(&memory, kBytes));
  download(0, static_cast<float*>(memory));
  must(cudaStreamSynchronize(streams_[0]));
  EXPECT_TRUE(std::isnan(host_[0]) && std::isnan(host_[kCount - 1]));
  must(cudaMemset(memory, 0, kBytes));
  must(cudaDeviceSynchronize());
  download(0, static_cast<float*>(memory));
  must(cudaStreamSynchronize(streams_[0]));
  EXPECT_EQ(host_[kCount - 1], 0.0F);
  must(cudaFree(memory));
  void* page_locked = nullptr;
  must(cudaMallocHost(&page_locked, sizeof(float)));
  EXPECT_TRUE(std::isnan(*static_cast<float*>(page_locked)));
  must(cudaFreeHost(page_locked));
}

TEST_F(StrictFake, SeesAFillThatOtherStreamsDoNotWaitFor) {
  EXPECT_TRUE(differs(0.0F, [&] {
    void* memory = nullptr;
    must(cudaMalloc(&memory, kBytes));
    must(cudaMemset(memory, 0, kBytes));  // on the default stream
    download(0, static_cast<float*>(memory));
    must(cudaStreamSynchronize(streams_[0]));
    const float found = host_[0];
    must(cudaDeviceSynchronize());
    must(cudaFree(memory));
    return found;
  }));
}

TEST_F(StrictFake, NamesAHostThatTouchesDeviceMemory) {
  const DeviceArray<float> values(kCount, 1.0F);
  EXPECT_DEATH(values.data()[3] = 1.0F, "fake CUDA: the host touches device memory");
  EXPECT_DEATH(host_[0] = *static_cast<volatile float*>(values.data()),
               "the host touches device memory");
}

TEST_F(StrictFake, NamesWorkThatTouchesTheMemoryOfAnotherGpu) {
  const DeviceArray<float> own(std::vector<float>(kCount, 2.0F));
  const int here = FakeCuda::current();
  const int there = here == 1 ? 0 : 1;
  must(cudaSetDevice(there));
  float* other = nullptr;
  must(cudaMalloc(reinterpret_cast<void**>(&other), kBytes));
  must(cudaSetDevice(here));
  const auto touch = [&] {
    add(0, other, 1.0F);
    test::await_stream(streams_[0]);
  };
  EXPECT_DEATH(touch(), "the host or another GPU touches device memory");
  const auto copy = [&](int to, int from) {
    return cudaMemcpyPeerAsync(other, to, own.data(), from, kBytes, streams_[0]);
  };
  {
    const FakeCuda::Complaints complaints;
    EXPECT_EQ(copy(here, there), cudaErrorInvalidValue);
    EXPECT_EQ(complaints.text(), "cudaMemcpyPeerAsync: memory of another GPU\n");
  }
  must(copy(there, here));
  test::await_stream(streams_[0]);
  must(cudaFree(other));
}

TEST_F(StrictFake, NamesKernelsThatLeaveTheirAllocation) {
  const auto touch = [&](std::ptrdiff_t place) {
    const DeviceArray<std::byte> values(100);
    std::byte* const start = values.data();
    must(test::launch_on_stream(streams_[0], &kernel_, [=] { start[place] = std::byte{1}; }));
    must(cudaStreamSynchronize(streams_[0]));
  };
  EXPECT_DEATH(touch(256), "access beyond an allocation of device memory");
  EXPECT_DEATH(touch(100), "a write beyond an allocation of device memory");
  EXPECT_DEATH(touch(-1), "a write beyond an allocation of device memory");
  touch(99);
}

TEST_F(StrictFake, NamesCopiesInAWrongDirectionAndBeyondAnAllocation) {
  const FakeCuda::Complaints complaints;
  const DeviceArray<float> values(kCount);
  const DeviceArray<float> others(kCount);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, streams_[0]);
  };
  EXPECT_EQ(copy(values.data(), host_, kBytes, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(host_, values.data(), kBytes, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(values.data(), others.data(), kBytes, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(complaints.text(),
            "cudaMemcpyAsync: a range that is not in one allocation of the GPU\n"
            "cudaMemcpyAsync: a range that is not in one allocation of the GPU\n"
            "cudaMemcpyAsync: device memory in the place of host memory\n");
  EXPECT_EQ(copy(values.data() + 1, host_, kBytes, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(values.data() + 1, 0, kBytes), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host_, 0, kBytes), cudaErrorInvalidValue);
  EXPECT_EQ(copy(values.data(), host_, kBytes, cudaMemcpyHostToDevice), cudaSuccess);
  must(cudaStreamSynchronize(streams_[0]));
}

TEST_F(StrictFake, NamesAllocationsAndFirstLaunchesInAStep) {
  const FakeCuda::Complaints complaints;
  static constexpr char kNew = 0;
  static constexpr char kLoaded = 0;
  must(test::load_kernel(&kLoaded));
  {
    const FakeCuda::NoAllocation in_step;
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorNotPermitted);
    EXPECT_EQ(cudaMallocHost(&memory, 1), cudaErrorNotPermitted);
    EXPECT_EQ(cudaFree(nullptr), cudaErrorNotPermitted);
    EXPECT_EQ(test::launch_on_stream(nullptr, &kLoaded, [] {}), cudaSuccess);
    EXPECT_EQ(test::launch_on_stream(nullptr, &kNew, [] {}), cudaErrorNotPermitted);
    must(cudaSetDevice(1));
    EXPECT_EQ(test::launch_on_stream(nullptr, &kLoaded, [] {}), cudaErrorNotPermitted);
    must(cudaSetDevice(0));
  }
  EXPECT_EQ(complaints.text(),
            "cudaMalloc in a step\ncudaMallocHost in a step\ncudaFree in a step\n"
            "the first launch of a kernel inside a step, which loads its code\n"
            "the first launch of a kernel inside a step, which loads its code\n");
}

TEST_F(StrictFake, NamesTheFirstStartOfALibraryOnAGpuInAStep) {
  const FakeCuda::Complaints complaints;
  FakeCuda::started_cublaslt = 1;  // on GPU 0
  cublasLtHandle_t handle = nullptr;
  {
    const FakeCuda::NoAllocation in_step;
    ASSERT_EQ(cublaslt().create(&handle), CUBLAS_STATUS_SUCCESS);
    cublaslt().destroy(handle);
    must(cudaSetDevice(1));
    EXPECT_EQ(cublaslt().create(&handle), CUBLAS_STATUS_ALLOC_FAILED);
    must(cudaSetDevice(0));
  }
  EXPECT_EQ(complaints.text(),
            "the first start of a library on a GPU inside a step, which allocates memory\n");
  FakeCuda::started_cublaslt = 0;
}

TEST_F(StrictFake, NamesMemoryThatIsFreedWhileWorkIsPending) {
  const FakeCuda::Complaints complaints;
  {
    const DeviceArray<float> values(kCount, 1.0F);
    add(0, values.data(), 1.0F);
  }
  EXPECT_EQ(complaints.text(), "cudaFree while work is pending\n");
  {
    const DeviceArray<float> values(kCount, 1.0F);
    add(0, values.data(), 1.0F);
    must(cudaStreamSynchronize(streams_[0]));
  }
  EXPECT_EQ(complaints.text(), "cudaFree while work is pending\n");
}

TEST_F(StrictFake, NamesOperandsOfProductsThatAreNotInOneAllocation) {
  using model::matrix;
  using model::cuda::Extras;
  using model::cuda::Products;
  const DeviceArray<float> workspace(Products::kWorkspace / sizeof(float));
  const DeviceArray<float> a(16 * 16, 1.0F);
  const DeviceArray<float> d(16 * 16);
  const DeviceArray<float> bias(16, 0.5F);
  std::vector<float> on_host(16 * 16);
  Products products;
  products.set_workspace(reinterpret_cast<std::byte*>(workspace.data()));
  const auto complaint_of = [&](const float* left, const float* right, float* out,
                                const Extras& extras = {}) {
    const FakeCuda::Complaints complaints;
    try {
      products.multiply(streams_[0], {16, 16, 16}, matrix(left, 16), matrix(right, 16),
                        matrix(out, 16), extras);
    } catch (const Error&) {
    }
    must(cudaStreamSynchronize(streams_[0]));
    return complaints.text();
  };
  EXPECT_EQ(complaint_of(a.data(), a.data(), d.data()), "");
  EXPECT_EQ(complaint_of(a.data(), a.data(), d.data(), {.bias = bias.data()}), "");
  const std::string end = " is not in one allocation of the GPU\n";
  const auto tells = [&](const std::string& complaint) {
    EXPECT_TRUE(complaint.starts_with("cublasLtMatmul: ") &&
                complaint.find(end) != std::string::npos)
        << complaint;
  };
  tells(complaint_of(a.data() + 16, a.data(), d.data()));
  tells(complaint_of(a.data(), a.data() + 16, d.data()));
  tells(complaint_of(a.data(), a.data(), d.data() + 16));
  tells(complaint_of(a.data(), a.data(), on_host.data()));
  tells(complaint_of(a.data(), a.data(), d.data(), {.bias = on_host.data()}));
  EXPECT_TRUE(std::isnan(values_after(d)) == false);
}

TEST_F(StrictFake, AFaultOfAKernelStays) {
  FakeCuda::kernels_until_fault = 1;
  const FakeCuda::Complaints complaints;
  const DeviceArray<float> values(kCount, 1.0F);
  add(0, values.data(), 1.0F);
  add(0, values.data(), 1.0F);
  EXPECT_EQ(cudaStreamSynchronize(streams_[0]), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(streams_[1]), cudaErrorIllegalAddress);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorIllegalAddress);
  FakeCuda::fault = cudaSuccess;
}

TEST_F(StrictFake, MemoryEndsWhereTheLibrariesBegin) {
  FakeCuda::started_cublaslt = 0;
  FakeCuda::library_memory = std::size_t{600} << 20U;
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, FakeCuda::memory - (std::size_t{500} << 20U)), cudaSuccess);
  cublasLtHandle_t handle = nullptr;
  EXPECT_EQ(cublaslt().create(&handle), CUBLAS_STATUS_ALLOC_FAILED);
  must(cudaFree(memory));
  ASSERT_EQ(cublaslt().create(&handle), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaMalloc(&memory, FakeCuda::memory - (std::size_t{500} << 20U)),
            cudaErrorMemoryAllocation);
  cublaslt().destroy(handle);
  FakeCuda::library_memory = 0;
  FakeCuda::with_library_memory = 0;
}

}  // namespace
}  // namespace ballast::device::strict_fake_test
