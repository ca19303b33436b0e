#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "tests/support/captured_log.h"

namespace ballast::device::choice_test {
namespace {

/// The error of make_device for a device of this kind.
std::string refusal_of(const std::string& kind, ErrorCategory category) {
  try {
    make_device({.kind = kind, .budget = kMiB});
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), category);
    return error.what();
  }
  return "";
}

TEST(MakeDevice, AnUnknownKindIsRefusedWithASuggestion) {
  const std::string text = refusal_of("hots", ErrorCategory::config);
  EXPECT_NE(text.find("did you mean 'host'"), std::string::npos) << text;
}

TEST(MakeDevice, MissingCudaIsRefusedWithReasonAndAlternative) {
  if (cuda_refusal().empty()) GTEST_SKIP() << "there is a CUDA device";
  const std::string text = refusal_of("cuda", ErrorCategory::device);
  EXPECT_EQ(text.find("ballast.device is \"cuda\", but "), 0U) << text;
  EXPECT_NE(text.find(cuda_refusal()), std::string::npos) << text;
  EXPECT_NE(text.find("use \"auto\" or \"host\""), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(KindOf, IsWhatMakeDeviceMakes) {
  for (const std::string kind : {"auto", "host"}) {
    const DeviceOptions options = {.kind = kind, .budget = kMiB};
    EXPECT_EQ(kind_of(options), make_device(options)->kind());
    EXPECT_EQ(shares_host_cores(options), kind_of(options) == "host");
  }
  EXPECT_EQ(kind_of({.kind = "host"}), "host");
  EXPECT_EQ(kind_of({.kind = "auto"}), gpu_refusal({}).empty() ? "cuda" : "host");
  EXPECT_EQ(kind_of({.kind = "cuda"}), "cuda");
  EXPECT_FALSE(shares_host_cores({.kind = "cuda"}));
}

TEST(GpuName, IsEmptyForTheHostDeviceAndRefusedWhereThereIsNoGpu) {
  EXPECT_EQ(gpu_name({.kind = "host"}), "");
  if (cuda_refusal().empty()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_EQ(gpu_name({.kind = "auto"}), "");
  EXPECT_THROW(gpu_name({.kind = "cuda"}), Error);
}

TEST(MakeDevice, TheReasonIsTheBuildOrTheDriver) {
  const std::string reason = cuda_refusal();
  if (reason.empty()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_NE(reason.find(cuda_built_in() ? "NVIDIA driver" : "-Dcuda=enabled"), std::string::npos)
      << reason;
}

TEST(MakeDevice, AutoIsTheHostDeviceWithoutAGpuAndLogsWhyOnce) {
  if (gpu_refusal({}).empty()) GTEST_SKIP() << "there is a usable GPU";
  const test::CapturedLog log;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(make_device({.budget = kMiB})->kind(), "host");
  const std::string said = "device: using the host device";
  const std::string text = log.text();
  const std::size_t first = text.find(said);
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find(said, first + 1), std::string::npos) << text;
}

}  // namespace
}  // namespace ballast::device::choice_test
