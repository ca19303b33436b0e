#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/device/streams.h"

#include "src/device/cuda/runtime.h"

namespace ballast::device::device_test {
namespace {

using Content = std::vector<std::byte>;

class CudaDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string refusal = cuda_refusal(); !refusal.empty()) GTEST_SKIP() << refusal;
  }
  static std::unique_ptr<Device> make(Bytes budget) {
    return make_device({.kind = "cuda", .budget = budget});
  }
};

Content pattern(Bytes size) {
  Content content(size);
  for (Bytes i = 0; i < size; ++i) content[i] = static_cast<std::byte>(i % 251 + 1);
  return content;
}

/// Delays `stream` by 100 ms.
void hold_up(Stream& stream) {
  const auto pause = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  ASSERT_EQ(cudaLaunchHostFunc(as_cuda(stream).native(), pause, nullptr), cudaSuccess);
}

/// The error that `call` throws.
template <class Call>
std::string error_of(ErrorCategory category, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), category) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST_F(CudaDevice, SaysWhatItIs) {
  const auto device = make(kMiB);
  EXPECT_EQ(device->kind(), "cuda");
  EXPECT_EQ(device->description().find("CUDA device 0, "), 0U) << device->description();
  EXPECT_EQ(device->budget(), kMiB);
}

TEST_F(CudaDevice, MemoryIsPageAlignedZeroedAndDealtOutOnce) {
  const auto device = make(kMiB);
  const auto stream = device->make_stream("copy");
  Bytes total = 0;
  for (const Bytes size : {Bytes{1}, kPage, kPage + 1, 100 * kKiB}) {
    const DeviceBytes memory = device->allocate(size, "buffer");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.raw()) % kPage, 0U);
    Content content = pattern(size);
    device->copy_to_host(*stream, content, memory);
    stream->synchronize();
    EXPECT_EQ(content, Content(size)) << size;
    device->copy_to_device(*stream, memory, pattern(size));
    total += round_up(size, kPage);
    EXPECT_EQ(device->allocated(), total);
  }
}

TEST_F(CudaDevice, AskingBeyondTheBudgetNamesTheBuffer) {
  const auto device = make(64 * kKiB);
  device->allocate(60 * kKiB, "weights");
  const std::string text =
      error_of(ErrorCategory::memory, [&] { device->allocate(5 * kKiB, "activations"); });
  EXPECT_NE(text.find("activations needs 8.00 KiB"), std::string::npos) << text;
}

TEST_F(CudaDevice, ABudgetBeyondTheMemoryNamesTheKey) {
  const std::string text = error_of(ErrorCategory::memory, [] { make(Bytes{1} << 60U); });
  EXPECT_NE(text.find("lower ballast.device_bytes"), std::string::npos) << text;
  error_of(ErrorCategory::memory, [] { make(0); });
}

TEST_F(CudaDevice, CopiesRoundTripAlsoFromAnotherThread) {
  const auto device = make(64 * kMiB);
  const Content in = pattern(50 * kMiB + 3);
  Content out(in.size());
  const DeviceBytes memory = device->allocate(in.size(), "buffer");
  std::thread([&] {
    const auto stream = device->make_stream("copy");
    device->copy_to_device(*stream, memory, in);
    device->copy_to_host(*stream, out, memory);
    device->copy_to_host(*stream, {}, {});
    stream->synchronize();
  }).join();
  EXPECT_TRUE(in == out);
}

TEST_F(CudaDevice, CopiesToAnOtherGpuArriveBothWays) {
  if (count_gpus() < 2) GTEST_SKIP() << "there is one GPU";
  constexpr Bytes kSize = 48 * kMiB + 5;
  const auto own = make(128 * kMiB);
  const auto other = make_device({.kind = "cuda", .budget = 128 * kMiB, .local_rank = 1});
  EXPECT_EQ(own->connect(*other), other->connect(*own));
  const Content in = pattern(kSize);
  const auto copy = [&](Device& from, Device& to) {
    Content out(kSize);
    const auto stream = from.make_stream("copy");
    const auto reading = to.make_stream("copy");
    const DeviceBytes source = from.allocate(kSize, "source");
    const DeviceBytes target = to.allocate(kSize, "target");
    from.copy_to_device(*stream, source, in);
    from.copy_to_other(*stream, to, target, source);
    stream->synchronize();
    to.copy_to_host(*reading, out, target);
    reading->synchronize();
    EXPECT_TRUE(in == out);
  };
  copy(*own, *other);
  copy(*other, *own);
}

cudaMemoryType type_of(const std::byte& byte) {
  cudaPointerAttributes attributes = {};
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, &byte), cudaSuccess);
  return attributes.type;
}

TEST_F(CudaDevice, MemoryIsPinnedAsLongAsThePinLives) {
  const auto device = make(kMiB);
  const Mapping mapping(kGiB + 8 * kMiB, "test");
  const HostBytes memory = mapping.bytes();
  const HostBytes inner = memory.subspan(2 * kMiB, kGiB + 4 * kMiB);  // more than one registration
  auto pin = device->pin(inner, "test");
  EXPECT_EQ(type_of(inner.front()), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(inner.back()), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(memory.front()), cudaMemoryTypeUnregistered);
  EXPECT_EQ(type_of(memory.back()), cudaMemoryTypeUnregistered);
  const std::string text =
      error_of(ErrorCategory::memory, [&] { device->pin(memory, "the test's size"); });
  EXPECT_NE(text.find("lower the test's size"), std::string::npos) << text;
  EXPECT_EQ(type_of(memory.front()), cudaMemoryTypeUnregistered);
  pin.reset();
  EXPECT_EQ(type_of(inner.front()), cudaMemoryTypeUnregistered);
  EXPECT_EQ(type_of(inner.back()), cudaMemoryTypeUnregistered);
}

TEST_F(CudaDevice, CallersDoNotWaitForCopiesOfPinnedMemory) {
  constexpr Bytes kSize = 8 * kMiB;
  const auto device = make(kSize);
  const auto stream = device->make_stream("copy");
  const Mapping mapping(2 * kSize, "test");
  const auto pin = device->pin(mapping.bytes(), "test");
  const HostBytes in = mapping.bytes().first(kSize);
  const HostBytes out = mapping.bytes().last(kSize);
  const Content content = pattern(kSize);
  std::copy(content.begin(), content.end(), in.begin());
  const DeviceBytes memory = device->allocate(kSize, "buffer");
  hold_up(*stream);
  device->copy_to_device(*stream, memory, in);
  device->copy_to_host(*stream, out, memory);
  EXPECT_EQ(cudaStreamQuery(as_cuda(*stream).native()), cudaErrorNotReady);
  static_cast<void>(cudaGetLastError());  // "not ready" is remembered
  stream->synchronize();
  EXPECT_TRUE(std::equal(in.begin(), in.end(), out.begin()));
}

/// Ranges that lie in two CUDA registrations.
TEST_F(CudaDevice, CopiesMayCrossThePartsOfAPin) {
  const auto device = make(kMiB);
  const auto stream = device->make_stream("copy");
  const Mapping mapping(kGiB + kMiB, "test");
  const auto pin = device->pin(mapping.bytes(), "test");
  const auto start = reinterpret_cast<std::uintptr_t>(mapping.bytes().data());
  const Bytes border = round_up(start + kPage, kGiB) - start;
  const Content content = pattern(6001);
  const HostBytes host = mapping.bytes().subspan(border - 3000, content.size());
  std::copy(content.begin(), content.end(), host.begin());
  const DeviceBytes memory = device->allocate(content.size(), "buffer");
  device->copy_to_device(*stream, memory, host);
  stream->synchronize();
  std::fill(host.begin(), host.end(), std::byte{});
  device->copy_to_host(*stream, host, memory);
  stream->synchronize();
  EXPECT_TRUE(std::equal(content.begin(), content.end(), host.begin()));
}

TEST_F(CudaDevice, EventsOrderWorkAcrossStreams) {
  const auto device = make(kMiB);
  const auto first = device->make_stream("first");
  const auto second = device->make_stream("second");
  const auto event = device->make_event();
  const Content in = pattern(kPage);
  Content out(in.size());
  const DeviceBytes memory = device->allocate(in.size(), "buffer");
  event->wait_on(*second);  // never recorded, so it does not wait
  hold_up(*first);
  device->copy_to_device(*first, memory, in);
  event->record(*first);
  event->wait_on(*second);
  device->copy_to_host(*second, out, memory);
  second->synchronize();
  EXPECT_EQ(out, in);

  std::atomic<bool> done = false;
  hold_up(*first);
  ASSERT_EQ(cudaLaunchHostFunc(
                as_cuda(*first).native(),
                [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &done),
            cudaSuccess);
  event->record(*first);
  event->synchronize();
  EXPECT_TRUE(done);
}

TEST_F(CudaDevice, AStreamIsDoneBeforeItIsGone) {
  const auto device = make(kMiB);
  const Content in = pattern(kPage);
  Content out(in.size());
  const DeviceBytes memory = device->allocate(in.size(), "buffer");
  {
    const auto stream = device->make_stream("copy");
    hold_up(*stream);
    device->copy_to_device(*stream, memory, in);
    device->copy_to_host(*stream, out, memory);
  }
  EXPECT_EQ(out, in);
}

TEST_F(CudaDevice, AFailureIsForgottenOnceItIsToldOrEndedInSilence) {
  const auto device = make(kMiB);
  const cudaError_t code = cudaSetDevice(100000);
  ASSERT_EQ(cudaPeekAtLastError(), code);
  error_of(ErrorCategory::device, [&] { check_cuda(code, "taking a device that is not there"); });
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);

  static int not_of_cuda = 0;
  CudaEnd<cudaFree>()(static_cast<void*>(&not_of_cuda));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST_F(CudaDevice, WatchesLookWhileSomebodyWaitsAndOnceWhenAllIsDone) {
  const auto device = make(kMiB);
  const auto stream = device->make_stream("watched");
  int looks = 0;
  int replaced = 0;
  as_cuda(*stream).set_watch(&looks, [&](double) { ++replaced; });
  as_cuda(*stream).set_watch(&looks, [&](double seconds) {
    EXPECT_GE(seconds, 0.0);
    ++looks;
  });
  hold_up(*stream);
  stream->synchronize();
  EXPECT_GT(looks, 1);
  EXPECT_EQ(replaced, 0);

  const int before = looks;
  stream->synchronize();
  EXPECT_EQ(looks, before) << "a watch is for one synchronize()";

  as_cuda(*stream).set_watch(&looks, [](double) { throw std::runtime_error("given up"); });
  EXPECT_THROW(stream->synchronize(), std::runtime_error);
  EXPECT_NO_THROW(stream->synchronize());
}

TEST_F(CudaDevice, StreamsOfTheHostDeviceAreRefused) {
  const auto device = make(kMiB);
  const auto host = make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
  const auto stream = host->make_stream("host");
  error_of(ErrorCategory::state, [&] { device->copy_to_host(*stream, {}, {}); });
  error_of(ErrorCategory::state, [&] { device->make_event()->record(*stream); });
}

}  // namespace
}  // namespace ballast::device::device_test
