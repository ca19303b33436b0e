// Streams of the CUDA device, on a fake of the CUDA runtime.
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/streams.h"

#include "tests/support/fake_cuda.h"

namespace ballast::device::cuda_stream_test {
namespace {

using test::FakeCuda;

TEST(CudaStreamVerdict, IsGivenOnceByTheNextSynchronize) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  int first = 0;
  int last = 0;
  as_cuda(*stream).add_verdict([&] { ++first; });
  as_cuda(*stream).add_verdict([&] {
    EXPECT_EQ(first, 1) << "not in turn";
    ++last;
    throw Error(ErrorCategory::data, "as asked for");
  });
  EXPECT_THROW(stream->synchronize(), Error);
  EXPECT_NO_THROW(stream->synchronize());
  EXPECT_EQ(first, 1);
  EXPECT_EQ(last, 1);
}

TEST(CudaStreamVerdict, IsReportedByALaterEvent) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  const auto event = device->make_event();
  const auto other = device->make_event();
  std::string given;
  as_cuda(*stream).add_verdict([&] { given += "a"; });
  event->record(*stream);
  as_cuda(*stream).add_verdict([&] { given += "b"; });
  event->record(*stream);
  as_cuda(*stream).add_verdict([&] { given += "c"; });
  other->record(*stream);
  as_cuda(*stream).add_verdict([&] {
    given += "d";
    throw Error(ErrorCategory::data, "as asked for");
  });
  event->synchronize();
  EXPECT_EQ(given, "ab");
  EXPECT_THROW(stream->synchronize(), Error);
  EXPECT_EQ(given, "abd");
  other->synchronize();
  event->synchronize();
  EXPECT_EQ(given, "abdc");
  as_cuda(*stream).add_verdict([] { throw Error(ErrorCategory::data, "as asked for"); });
  event->record(*stream);
  EXPECT_THROW(event->synchronize(), Error);
  EXPECT_NO_THROW(event->synchronize());
}

TEST(CudaStreamVerdict, IsNotAskedForWhenTheStreamEnds) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  bool asked = false;
  {
    const auto stream = device->make_stream("test");
    as_cuda(*stream).add_verdict([&] { asked = true; });
  }
  EXPECT_FALSE(asked);
}

/// Returns a watch that counts its calls, and throws at call number `last` (from 1).
CudaStream::Watch watch_until(int last, int& calls) {
  return [&calls, last](double) {
    if (++calls == last) throw Error(ErrorCategory::comm, "given up");
  };
}

TEST(CudaStreamWatch, EndsTheWaitForAnEventThatNeverComes) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  const auto event = device->make_event();
  int calls = 0;
  as_cuda(*stream).set_watch(&calls, watch_until(3, calls));
  event->record(*stream);
  FakeCuda::busy_queries = 1000000000;
  EXPECT_THROW(event->synchronize(), Error);
  FakeCuda::busy_queries = 0;
  EXPECT_EQ(calls, 3);
  EXPECT_NO_THROW(event->synchronize()) << "an error is thrown once";
  EXPECT_NO_THROW(stream->synchronize());
  EXPECT_EQ(calls, 3) << "the watch belongs to the event";
}

TEST(CudaStreamWatch, IsCalledAtTheEndOfTheWaitForItsEventOnly) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  const auto before = device->make_event();
  const auto event = device->make_event();
  before->record(*stream);
  int replaced = 0;
  int calls = 0;
  as_cuda(*stream).set_watch(&calls, watch_until(1, replaced));
  as_cuda(*stream).set_watch(&calls, watch_until(2, calls));
  event->record(*stream);
  before->synchronize();
  EXPECT_EQ(calls, 0);
  event->synchronize();
  EXPECT_EQ(calls, 1);
  // An event that is recorded again keeps what was not awaited.
  as_cuda(*stream).set_watch(&calls, watch_until(2, calls));
  event->record(*stream);
  event->record(*stream);
  EXPECT_THROW(event->synchronize(), Error);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(replaced, 0);
}

/// Runs `work` in a new thread, whose current GPU is number 0 until it selects another.
template <class Work>
void in_new_thread(const Work& work) {
  std::thread([&] {
    try {
      work();
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }).join();
}

TEST(CudaStreamThreads, EveryThreadSelectsTheGpuBeforeItUsesAStreamOrAnEvent) {
  const int before = FakeCuda::wrong_device;
  auto device = make_device({.kind = "cuda", .budget = kMiB, .local_rank = 1});
  const DeviceBytes memory = device->allocate(kPage, "test");
  std::vector<std::byte> host(kPage);
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Event> event;
  in_new_thread([&] { stream = device->make_stream("test"); });
  in_new_thread([&] { event = device->make_event(); });
  in_new_thread([&] { device->copy_to_device(*stream, memory, host); });
  in_new_thread([&] { device->copy_to_host(*stream, host, memory); });
  in_new_thread([&] { event->record(*stream); });
  in_new_thread([&] { event->wait_on(*stream); });
  in_new_thread([&] { event->synchronize(); });
  in_new_thread([&] { stream->synchronize(); });
  in_new_thread([&] {
    FakeCuda::busy_queries = 1;
    as_cuda(*stream).set_watch(&host, [](double) {});
    stream->synchronize();
  });
  in_new_thread([&] {
    FakeCuda::busy_queries = 1;
    as_cuda(*stream).set_watch(&host, [](double) {});
    event->record(*stream);
  });
  in_new_thread([&] { event->synchronize(); });
  in_new_thread([&] { event.reset(); });
  in_new_thread([&] { stream.reset(); });
  EXPECT_EQ(FakeCuda::wrong_device, before);
}

}  // namespace
}  // namespace ballast::device::cuda_stream_test
