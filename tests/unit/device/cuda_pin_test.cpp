// Pinned host memory of the CUDA device, on a fake of the CUDA runtime.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ballast/core/error.h"
#include "ballast/core/mapping.h"
#include "ballast/device/device.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/page_making.h"

namespace ballast::device::cuda_pin_test {
namespace {

using test::FakeCuda;

constexpr Bytes kSize = 2 * kGiB + 512 * kMiB;
constexpr std::string_view kSetting = "ballast.host_bytes";

/// Makes `memory` read-only or writable.
void protect(HostBytes memory, int protection) {
  ASSERT_EQ(mprotect(memory.data(), memory.size(), protection), 0);
}

class CudaPinning : public testing::Test {
 protected:
  /// Address space without pages: they cannot be made, and the fake does not touch them.
  static Mapping address_space(Bytes bytes) {
    Mapping mapping(bytes, "test");
    protect(mapping.bytes(), PROT_NONE);
    return mapping;
  }

  void SetUp() override {
    FakeCuda::registrations_left = -1;
    FakeCuda::refused_unregistrations = 0;
  }
  void TearDown() override {
    FakeCuda::registrations_left = -1;
    FakeCuda::told_of_registrations = nullptr;
    EXPECT_TRUE(FakeCuda::registered().empty());
    EXPECT_EQ(FakeCuda::refused_unregistrations, 0);
  }

  std::atomic<bool> interrupted_ = false;
  std::unique_ptr<Device> device_ =
      make_device({.kind = "cuda", .budget = kMiB, .interrupted = &interrupted_});
  Mapping mapping_ = address_space(kSize);
};

/// Expects that the registrations cover `memory`, each within one GiB of the address space.
void expect_pieces_of(HostBytes memory) {
  const std::byte* at = memory.data();
  for (const FakeCuda::Piece& piece : FakeCuda::registered()) {
    EXPECT_EQ(piece.start, at);
    at += piece.size;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.start) / kGiB,
              (reinterpret_cast<std::uintptr_t>(at) - 1) / kGiB);
  }
  EXPECT_EQ(at, memory.data() + memory.size());
}

std::string refusal(Device& device, HostBytes memory) {
  try {
    device.pin(memory, kSetting);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST_F(CudaPinning, CoversTheMemoryInPartsUntilThePinEnds) {
  for (const HostBytes memory : {mapping_.bytes(), mapping_.bytes().subspan(5 * kPage, 3 * kPage),
                                 mapping_.bytes().last(kGiB + kPage)}) {
    auto pin = device_->pin(memory, kSetting);
    expect_pieces_of(memory);
    pin.reset();
    EXPECT_TRUE(FakeCuda::registered().empty());
  }
}

TEST_F(CudaPinning, OfAnEmptyRangeDoesNothing) {
  const auto pin = device_->pin({}, kSetting);
  EXPECT_NE(pin, nullptr);
  EXPECT_TRUE(FakeCuda::registered().empty());
}

TEST_F(CudaPinning, AFailureHalfwayReportsItsProgressAndUnpins) {
  Bytes pinned = 0;
  {
    const auto pin = device_->pin(mapping_.bytes(), kSetting);
    const auto pieces = FakeCuda::registered();
    ASSERT_GE(pieces.size(), 3U);
    pinned = pieces[0].size + pieces[1].size;
  }
  FakeCuda::registrations_left = 2;
  const std::string text = refusal(*device_, mapping_.bytes());
  EXPECT_TRUE(FakeCuda::registered().empty());
  EXPECT_EQ(text, "host memory (ballast.host_bytes): " + format_bytes(pinned) +
                      " of 2.50 GiB could be pinned for CUDA device 0; CUDA: a fake's error "
                      "(cudaErrorFake); lower ballast.host_bytes");
}

TEST_F(CudaPinning, AFailureAtTheStartIsReported) {
  FakeCuda::registrations_left = 0;
  const std::string text = refusal(*device_, mapping_.bytes());
  EXPECT_NE(text.find(": nothing of 2.50 GiB could be pinned"), std::string::npos) << text;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the next call would report it again";
}

TEST_F(CudaPinning, OfPinnedMemoryIsRefusedAndChangesNothing) {
  const HostBytes inner = mapping_.bytes().subspan(kGiB, 4 * kPage);
  const auto pin = device_->pin(inner, kSetting);
  refusal(*device_, mapping_.bytes());
  expect_pieces_of(inner);
}

TEST_F(CudaPinning, OfLargeMemoryIsLogged) {
  const Mapping much = address_space(9 * kGiB);
  const test::CapturedLog log;
  device_->pin(mapping_.bytes(), kSetting);
  EXPECT_EQ(log.text().find("pinning"), std::string::npos) << log.text();
  device_->pin(much.bytes(), kSetting);
  EXPECT_NE(log.text().find("pinning 9.00 GiB of host memory (ballast.host_bytes)"),
            std::string::npos)
      << log.text();
}

TEST_F(CudaPinning, MakesThePagesItself) {
  if (!test::kernel_makes_pages()) GTEST_SKIP() << "not with this kernel";
  const Mapping memory(64 * kMiB, "test");
  const auto pin = device_->pin(memory.bytes(), kSetting);
  std::vector<unsigned char> pages(memory.bytes().size() / kPage);
  ASSERT_EQ(mincore(memory.bytes().data(), memory.bytes().size(), pages.data()), 0);
  EXPECT_EQ(std::count(pages.begin(), pages.end(), 0), 0);
}

TEST_F(CudaPinning, IsInterruptedBetweenPartsAndLeavesNothing) {
  FakeCuda::told_of_registrations = &interrupted_;
  FakeCuda::registrations_left = 2;  // the third one fails
  try {
    device_->pin(mapping_.bytes(), kSetting);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::interrupted);
    EXPECT_EQ(std::string(error.what()),
              "interrupted while pinning host memory (ballast.host_bytes)");
  }
  EXPECT_EQ(FakeCuda::registrations_left, 1);
  EXPECT_TRUE(FakeCuda::registered().empty());
}

/// A copy must stay within one registration.
TEST_F(CudaPinning, CopiesMayCrossItsParts) {
  const auto pin = device_->pin(mapping_.bytes(), kSetting);
  const Bytes border = FakeCuda::registered()[0].size;
  protect(mapping_.bytes(), PROT_READ | PROT_WRITE);
  const HostBytes out = mapping_.bytes().subspan(border - 1000, 3001);
  const HostBytes back = mapping_.bytes().subspan(border + kGiB - 2000, out.size());
  for (Bytes i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i % 251 + 1);
  const auto stream = device_->make_stream("copy");
  const DeviceBytes memory = device_->allocate(out.size(), "buffer");
  device_->copy_to_device(*stream, memory, out);
  device_->copy_to_host(*stream, back, memory);
  stream->synchronize();
  EXPECT_TRUE(std::equal(out.begin(), out.end(), back.begin()));
}

}  // namespace
}  // namespace ballast::device::cuda_pin_test
