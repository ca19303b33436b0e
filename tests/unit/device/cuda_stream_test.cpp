// Streams of the CUDA device, on a fake of CUDA's runtime.
#include "ballast/device/cuda_stream.h"

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::device {
namespace {

TEST(CudaStreamVerdict, IsGivenOnceByTheNextSynchronize) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  const auto stream = device->make_stream("test");
  int first = 0;
  int last = 0;
  as_cuda(*stream).set_verdict(&first, [&] { ++first; });
  as_cuda(*stream).set_verdict(&first, [&] {
    ++last;
    throw Error(ErrorCategory::data, "as asked for");
  });
  EXPECT_THROW(stream->synchronize(), Error);
  EXPECT_NO_THROW(stream->synchronize());
  EXPECT_EQ(first, 0);
  EXPECT_EQ(last, 1);
}

TEST(CudaStreamVerdict, IsNotAskedForWhenTheStreamEnds) {
  const auto device = make_device({.kind = "cuda", .budget = kMiB});
  bool asked = false;
  {
    const auto stream = device->make_stream("test");
    as_cuda(*stream).set_verdict(&asked, [&] { asked = true; });
  }
  EXPECT_FALSE(asked);
}

}  // namespace
}  // namespace ballast::device
