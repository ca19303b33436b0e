// Tests which device "auto" selects, on a fake of the CUDA runtime with several GPUs. Facts about a
// local rank's GPU are cached, so each test uses a different rank.
#include <cstdlib>
#include <filesystem>
#include <string>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/device/cuda/runtime.h"
#include "tests/support/captured_log.h"
#include "tests/support/expect_error.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/temp_dir.h"
#include "tests/support/variable.h"

namespace ballast::device::cuda_choice_test {
namespace {

using test::FakeCuda;

DeviceOptions options_of(const std::string& kind, std::uint32_t local_rank) {
  return {.kind = kind, .budget = kMiB, .local_rank = local_rank};
}

TEST(AutoDeviceKind, IsAUsableGpu) {
  const DeviceOptions options = options_of("auto", 0);
  EXPECT_EQ(gpu_refusal(options), "");
  EXPECT_EQ(kind_of(options), "cuda");
  EXPECT_FALSE(shares_host_cores(options));
  EXPECT_GT(own_memory(options), 0U);
  EXPECT_EQ(gpu_name(options), "Fake GPU, 8.00 GiB");
  EXPECT_EQ(make_device(options)->kind(), "cuda");
}

TEST(CudaConnections, AreRaisedBeforeTheFirstCallUnlessTheUserSetsThem) {
  make_device(options_of("cuda", 0));
  EXPECT_EQ(FakeCuda::connections_at_start(), "32");
  const test::Variable users("CUDA_DEVICE_MAX_CONNECTIONS", "16");
  raise_connections();
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "16");
}

/// Controls of the fake, which the end of a test resets.
class AutoDevice : public testing::Test {
 protected:
  ~AutoDevice() override {
    FakeCuda::old_gpu = -1;
    FakeCuda::old_capability = 75;
    FakeCuda::driver = FakeCuda::kSameVersion;
    FakeCuda::has_gpus = true;
    FakeCuda::root = "/nonexistent";
    FakeCuda::missing_library.clear();
  }

  /// The error of all functions that need to know the device, and of make_device().
  static std::string refusal_of(const std::string& kind, std::uint32_t local_rank) {
    const DeviceOptions options = options_of(kind, local_rank);
    const auto error = [](const auto& call) { return test::error_of(ErrorCategory::device, call); };
    std::string text = error([&] { require_device(options); });
    EXPECT_EQ(error([&] { make_device(options); }), text);
    EXPECT_EQ(error([&] { gpu_name(options); }), text);
    if (kind == "auto") {
      EXPECT_EQ(error([&] { kind_of(options); }), text);
      EXPECT_EQ(error([&] { own_memory(options); }), text);
      EXPECT_TRUE(has_unusable_gpu(options));
    }
    return text;
  }
  static void expect_host(std::uint32_t local_rank) {
    const DeviceOptions options = options_of("auto", local_rank);
    EXPECT_EQ(kind_of(options), "host");
    EXPECT_EQ(own_memory(options), 0U);
    EXPECT_EQ(make_device(options)->kind(), "host");
    EXPECT_FALSE(has_unusable_gpu(options));
  }
  static constexpr const char* kOnCpu =
      "; to train on the CPU on purpose, set ballast.device to \"host\"";
};

TEST_F(AutoDevice, RefusesAGpuWithoutTheTrainingType) {
  FakeCuda::old_gpu = 2;
  const std::string reason =
      "CUDA device 2, Fake GPU, has compute capability 7.5 and so no bf16; enable fp16 instead "
      "(fp16.enabled) to train on it";
  EXPECT_EQ(gpu_refusal(options_of("auto", 2)), reason);
  EXPECT_EQ(refusal_of("auto", 2),
            "ballast.device is \"auto\" and there is a GPU, but " + reason + kOnCpu);
  EXPECT_EQ(refusal_of("cuda", 2), "ballast.device is \"cuda\", but " + reason + kOnCpu);
  for (const DType type : {DType::f16, DType::f32}) {
    DeviceOptions other = options_of("auto", 2);
    other.type = type;
    EXPECT_EQ(gpu_refusal(other), "");
    EXPECT_EQ(make_device(other)->kind(), "cuda");
  }
}

TEST_F(AutoDevice, IsTheHostBesideAGpuThatIsTooOldForAnyTraining) {
  FakeCuda::old_gpu = 0;
  FakeCuda::old_capability = 61;
  expect_host(8);  // GPUs are assigned in turn
  EXPECT_NE(gpu_refusal(options_of("auto", 8)).find("the oldest that trains has 7.5"),
            std::string::npos);
}

TEST_F(AutoDevice, RefusesAGpuWithoutALibraryThatItNeeds) {
  FakeCuda::missing_library = "libcublasLt.so cannot be loaded";
  const std::string advice =
      "; to train on the GPU without it, slowly, set ballast.kernels to \"plain\"" +
      std::string(kOnCpu);
  EXPECT_EQ(refusal_of("auto", 3), "ballast.device is \"auto\" and there is a GPU, but " +
                                       FakeCuda::missing_library + advice);
  EXPECT_EQ(refusal_of("cuda", 3),
            "ballast.device is \"cuda\", but " + FakeCuda::missing_library + advice);
  DeviceOptions plain = options_of("auto", 3);
  plain.needs_libraries = false;
  EXPECT_EQ(make_device(plain)->kind(), "cuda");
}

TEST_F(AutoDevice, RefusesAGpuWhoseDriverIsTooOld) {
  constexpr int kMajor = CUDART_VERSION / 1000;
  const test::TempDir files;
  std::filesystem::create_directories(files.path() / "dev");
  files.write("dev/nvidia0", "");
  std::filesystem::create_directories(files.path() / "proc/driver/nvidia");
  files.write(
      "proc/driver/nvidia/version",
      "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\nGCC version:\n");
  FakeCuda::root = files.path();
  FakeCuda::driver = 1000 * (kMajor - 1) + 20;
  const std::string text = refusal_of("auto", 4);
  const std::string begin = fmt::format(
      "ballast.device is \"auto\" and there is a GPU, but the NVIDIA driver 470.82.01 "
      "supports CUDA {}.2, and this program needs CUDA {}",
      kMajor - 1, kMajor);
  EXPECT_TRUE(text.starts_with(begin)) << text;
  const std::string advice =
      kMajor > 12 ? ": update the driver to 580 or newer, or use the bundle of this program for "
                    "CUDA 12"
                  : ": update the driver to 525 or newer";
  EXPECT_TRUE(text.ends_with(advice + kOnCpu)) << text;
  EXPECT_TRUE(refusal_of("cuda", 4).ends_with(advice + kOnCpu));
}

TEST_F(AutoDevice, IsTheHostWithoutAGpu) {
  FakeCuda::driver = 11080;  // of an image whose driver library serves no GPU
  expect_host(5);
  FakeCuda::driver = 0;
  expect_host(6);
  EXPECT_EQ(gpu_refusal(options_of("auto", 6)), "there is no NVIDIA driver on this machine");
  FakeCuda::driver = FakeCuda::kSameVersion;
  FakeCuda::has_gpus = false;
  expect_host(7);
  try {
    make_device(options_of("cuda", 7));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "ballast.device is \"cuda\", but the NVIDIA driver reports no GPU to this process; "
        "use \"auto\" or \"host\"");
  }
}

TEST(DriverFiles, AreReadAsTheDriverWritesThem) {
  const test::TempDir root;
  EXPECT_EQ(driver_version(root.path()), "");
  EXPECT_FALSE(has_gpu_file(root.path()));
  std::filesystem::create_directories(root.path() / "dev");
  std::filesystem::create_directories(root.path() / "proc/driver/nvidia");
  for (const std::string name : {"nvidia", "nvidiactl", "nvidia-uvm", "nvidia0x"}) {
    root.write("dev/" + name, "");
  }
  EXPECT_FALSE(has_gpu_file(root.path())) << "these belong to no GPU";
  root.write("dev/nvidia7", "");
  EXPECT_TRUE(has_gpu_file(root.path()));
  for (const std::string line : {"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n",
                                 "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                                 "580.95.05  Release Build  (root@x)  Tue\n"}) {
    root.write("proc/driver/nvidia/version", line);
    EXPECT_EQ(driver_version(root.path()), "580.95.05");
  }
}

TEST(MachineCode, RunsOnGpusOfTheSameMajorNumber) {
  for (const int capability : {80, 86, 89, 90}) {
    EXPECT_FALSE(compiles_kernels("80, 89, 90", capability)) << capability;
  }
  for (const int capability : {100, 103, 120, 121}) {
    EXPECT_TRUE(compiles_kernels("80, 89, 90", capability)) << capability;
    EXPECT_FALSE(compiles_kernels("80, 89, 90, 100, 120", capability)) << capability;
  }
  EXPECT_TRUE(compiles_kernels("89", 90));
  EXPECT_FALSE(compiles_kernels("89", 86));  // neither code nor PTX: launches fail
  EXPECT_FALSE(compiles_kernels("75", 120));
  EXPECT_FALSE(compiles_kernels("", 120));  // the build's own GPU
  EXPECT_EQ(describe_codes("80, 89, 120"), "8.0, 8.9, 12.0");
}

TEST_F(AutoDevice, SaysOnceThatTheDriverCompilesKernels) {
  if (gpu_code().empty()) GTEST_SKIP() << "the build chose its GPU itself";
  FakeCuda::old_gpu = 1;
  FakeCuda::old_capability = 137;
  const test::CapturedLog log;
  for (int run = 0; run < 2; ++run) make_device(options_of("cuda", 41));
  const std::string line = "compiling kernels for this GPU, Fake GPU with compute capability 13.7";
  const std::size_t first = log.text().find(line);
  ASSERT_NE(first, std::string::npos) << log.text();
  EXPECT_EQ(log.text().find(line, first + 1), std::string::npos) << log.text();
}

TEST(CudaRequirement, NamesTheOldestDriver) {
  const int major = CUDART_VERSION / 1000;
  EXPECT_EQ(cuda_requirement(), fmt::format("CUDA {}.{}, for drivers from {} on", major,
                                            CUDART_VERSION % 1000 / 10, major > 12 ? 580 : 525));
}

}  // namespace
}  // namespace ballast::device::cuda_choice_test
