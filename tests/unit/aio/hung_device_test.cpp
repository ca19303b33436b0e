#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "aio/block_queue.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/captured_log.h"
#include "tests/support/gate_transport.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::hung_device_test {
namespace {

class HungDevice : public testing::Test {
 protected:
  [[nodiscard]] std::unique_ptr<BlockQueue> queue(unsigned depth, double stall, double abandon) {
    return std::make_unique<BlockQueue>(
        "gate",
        QueueOptions{
            .block_bytes = 10, .depth = depth, .stall_seconds = stall, .abandon_seconds = abandon},
        [this](unsigned) { return std::make_unique<test::GateTransport>(gate_); });
  }
  [[nodiscard]] Request request(Bytes length) const {
    return {Direction::write, &file_, 0, memory_.view(0, length)};
  }

  test::TempDir directory_;
  File file_ = File::create_anonymous(directory_.path(), kMiB, File::Access::buffered);
  test::AlignedBytes memory_{kMiB};
  test::Gate gate_;
};

/// Queued requests must end even if blocks that fill the depth never return.
TEST_F(HungDevice, QueuedRequestsEndWhenAllBlocksAtTheDeviceAreAbandoned) {
  auto queue = this->queue(1, 0.05, 0.2);
  const Ticket stuck = queue->submit(request(10));
  gate_.wait_for_starts(1);
  const Ticket behind = queue->submit(request(10));
  EXPECT_EQ(queue->wait(stuck).error_number, ETIMEDOUT);
  auto waiting = std::async(std::launch::async, [&] { return queue->wait(behind).error_number; });
  const bool ended = waiting.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  EXPECT_TRUE(ended);
  if (!ended) gate_.finish(0);
  if (!ended) {
    gate_.wait_for_starts(2);
    gate_.finish(1);
  }
  (void)waiting.get();
}

TEST_F(HungDevice, TheDestructorReturnsAlthoughRequestsAreQueuedBehindAHungBlock) {
  auto queue = this->queue(1, 0.05, 0.2);
  (void)queue->submit(request(10));
  gate_.wait_for_starts(1);
  (void)queue->submit(request(10));
  auto ending = std::async(std::launch::async, [&] { queue.reset(); });
  const bool ended = ending.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  EXPECT_TRUE(ended);
  if (!ended) gate_.finish(0);
  if (!ended) {
    gate_.wait_for_starts(2);
    gate_.finish(1);
  }
  ending.get();
}

/// A second block of an abandoned request stalls after the waiter has taken the completion and its
/// file name.
TEST_F(HungDevice, EveryWarningNamesTheFile) {
  const test::CapturedLog log;
  auto queue = this->queue(2, 1, 2);
  const Ticket ticket = queue->submit(request(30));
  gate_.wait_for_starts(2);
  while (log.text().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  gate_.finish(1);
  gate_.wait_for_starts(3);
  EXPECT_EQ(queue->wait(ticket).error_number, ETIMEDOUT);
  std::string text;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    text = log.text();
  } while (std::ranges::count(text, '\n') < 3);
  EXPECT_EQ(std::ranges::count(text, '\n'), 3) << text;
  EXPECT_EQ(text.find("aio: write  "), std::string::npos) << text;
  gate_.finish(0);
  gate_.finish(2);
}

}  // namespace
}  // namespace ballast::aio::hung_device_test
