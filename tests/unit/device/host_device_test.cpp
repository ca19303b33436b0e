#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/streams.h"

namespace ballast::device::host_device_test {
namespace {

std::unique_ptr<Device> make(Bytes budget, double link_gbps = 0.0) {
  return make_device(
      {.kind = "host", .budget = budget, .compute_threads = 1, .link_gbps = link_gbps});
}

TEST(HostDevice, AskingBeyondTheBudgetFailsAndNamesTheBuffer) {
  const auto device = make(64 * kKiB);
  EXPECT_EQ(device->allocate(60 * kKiB, "weights").size(), 60 * kKiB);
  try {
    device->allocate(5 * kKiB, "activations");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(std::string(error.what()).find("activations needs 8.00 KiB"), std::string::npos);
  }
  EXPECT_EQ(device->allocated(), 60 * kKiB);
}

TEST(HostDevice, CopiesToAnother) {
  const auto from = make(64 * kKiB);
  const auto to = make(64 * kKiB);
  const DeviceBytes source = from->allocate(8 * kKiB, "source");
  const DeviceBytes target = to->allocate(8 * kKiB, "target");
  const auto stream = from->make_stream("pass");
  std::vector<std::byte> sent(8 * kKiB, std::byte{7});
  std::vector<std::byte> received(sent.size());
  ASSERT_TRUE(from->connect(*to));
  from->copy_to_device(*stream, source, sent);
  from->copy_to_other(*stream, *to, target, source);
  to->copy_to_host(*stream, received, target);
  stream->synchronize();
  EXPECT_EQ(received, sent);
}

TEST(HostDevice, ARefusedMappingNamesTheDeviceAndTheKey) {
  try {
    make(Bytes{1} << 60U);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    const std::string text = error.what();
    EXPECT_NE(text.find("the host device (ballast.device_bytes): cannot map "), std::string::npos)
        << text;
  }
}

TEST(HostDevice, CopiesRoundTripThroughTheArena) {
  const auto device = make(1 * kMiB);
  const auto stream = device->make_stream("copy");
  std::vector<std::byte> in(10000);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7);
  std::vector<std::byte> out(in.size());
  const auto memory = device->allocate(in.size(), "buffer");
  device->copy_to_device(*stream, memory, in);
  device->copy_to_host(*stream, out, memory);
  stream->synchronize();
  EXPECT_EQ(in, out);
}

TEST(HostDevice, EventsOrderWorkAcrossStreams) {
  const auto device = make(1 * kMiB);
  const auto first = device->make_stream("first");
  const auto second = device->make_stream("second");
  const auto event = device->make_event();
  std::atomic<int> value = 0;
  dynamic_cast<HostStream&>(*first).enqueue([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    value = 1;
  });
  event->record(*first);
  event->wait_on(*second);
  int seen = -1;
  dynamic_cast<HostStream&>(*second).enqueue([&] { seen = value; });
  second->synchronize();
  EXPECT_EQ(seen, 1);
}

TEST(HostDevice, AnEventReportsOnlyErrorsOfEarlierWork) {
  const auto device = make(1 * kMiB);
  const auto stream = device->make_stream("failing");
  const auto before = device->make_event();
  const auto behind = device->make_event();
  EXPECT_NO_THROW(before->synchronize()) << "never recorded";
  auto& host = dynamic_cast<HostStream&>(*stream);
  std::atomic<bool> ran = false;
  host.enqueue([&] { ran = true; });
  before->record(*stream);
  host.enqueue([] { throw Error(ErrorCategory::device, "broken kernel"); });
  behind->record(*stream);
  EXPECT_THROW(behind->synchronize(), Error);
  EXPECT_NO_THROW(before->synchronize());
  EXPECT_TRUE(ran);
  EXPECT_THROW(behind->synchronize(), Error) << "the stream still drops what follows";
  EXPECT_THROW(stream->synchronize(), Error);
  EXPECT_NO_THROW(behind->synchronize()) << "told by the stream";
}

TEST(HostStream, WorkThatEnqueuesMoreRunsThatAsAPartOfItself) {
  HostStream stream("nested", 1);
  std::vector<int> order;
  stream.enqueue([&] {
    order.push_back(1);
    stream.enqueue([&] { order.push_back(2); });
    order.push_back(3);
    stream.enqueue([] { throw Error(ErrorCategory::comm, "inside"); });
    order.push_back(4);
  });
  stream.enqueue([&] { order.push_back(5); });
  EXPECT_THROW(stream.synchronize(), Error);
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(HostStream, KeepsTheFirstErrorForSynchronizeAndDropsWhatFollows) {
  HostStream stream("failing", 1);
  bool ran = false;
  stream.enqueue([] { throw Error(ErrorCategory::device, "broken kernel"); });
  stream.enqueue([&] { ran = true; });
  EXPECT_THROW(stream.synchronize(), Error);
  EXPECT_FALSE(ran);
  stream.enqueue([&] { ran = true; });
  EXPECT_NO_THROW(stream.synchronize());
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace ballast::device::host_device_test
