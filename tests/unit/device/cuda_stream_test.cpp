// Streams of the CUDA device, on a fake of the CUDA runtime.
#include "ballast/device/cuda_stream.h"

#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::device {
namespace {

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

TEST(CudaStreamVerdict, IsGivenByTheEventBehindIt) {
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

}  // namespace
}  // namespace ballast::device
