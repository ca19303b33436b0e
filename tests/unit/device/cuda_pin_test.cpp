// Pinned host memory of the CUDA device, on a fake of the CUDA runtime.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
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
    FakeCuda::registration_error = cudaErrorMemoryAllocation;
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

TEST_F(CudaPinning, WhatTheSystemRefusesStaysPageable) {
  Bytes whole = 0;
  {
    const auto pin = device_->pin(mapping_.bytes(), kSetting);
    EXPECT_EQ(pin->bytes(), kSize);
    const auto pieces = FakeCuda::registered();
    ASSERT_GE(pieces.size(), 3U);
    whole = pieces[0].size + pieces[1].size;
  }
  for (const auto& [granted, text] :
       {std::pair(2, format_bytes(whole)), std::pair(0, std::string("nothing"))}) {
    FakeCuda::registrations_left = granted;
    const test::CapturedLog log;
    const auto pin = device_->pin(mapping_.bytes(), kSetting);
    EXPECT_EQ(pin->bytes(), granted == 0 ? 0 : whole);
    EXPECT_EQ(FakeCuda::registered().size(), static_cast<std::size_t>(granted));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the next call would report it again";
    const std::string line =
        "host memory (ballast.host_bytes): " + text +
        " of 2.50 GiB could be pinned for CUDA device 0; CUDA: a fake's error (cudaErrorFake); the "
        "rest is copied more slowly";
    const auto at = log.text().find(line);
    EXPECT_NE(at, std::string::npos) << log.text();
    EXPECT_EQ(log.text().find(line, at + 1), std::string::npos) << "one line";
  }
}

TEST_F(CudaPinning, CopiesMayCrossTheBorderOfWhatIsPinned) {
  FakeCuda::registrations_left = 1;
  const auto pin = device_->pin(mapping_.bytes(), kSetting);
  const Bytes border = pin->bytes();
  protect(mapping_.bytes(), PROT_READ | PROT_WRITE);
  const HostBytes out = mapping_.bytes().subspan(border - 1000, 3001);
  const HostBytes back = mapping_.bytes().subspan(border + 5000, out.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i % 251);
  const auto stream = device_->make_stream("copies");
  const DeviceBytes memory = device_->allocate(out.size(), "buffer");
  device_->copy_to_device(*stream, memory, out);
  device_->copy_to_host(*stream, back, memory);
  stream->synchronize();
  EXPECT_TRUE(std::equal(out.begin(), out.end(), back.begin()));
}

TEST_F(CudaPinning, OtherFailuresEndItAndUnpin) {
  FakeCuda::registrations_left = 2;
  FakeCuda::registration_error = cudaErrorInvalidValue;
  const std::string text = refusal(*device_, mapping_.bytes());
  EXPECT_TRUE(FakeCuda::registered().empty());
  EXPECT_NE(text.find("; lower ballast.host_bytes"), std::string::npos) << text;
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
