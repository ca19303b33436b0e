#include "aio/block_queue.h"

#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/aligned_bytes.h"
#include "tests/support/gate_transport.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::block_queue_test {
namespace {

using test::AlignedBytes;
using test::Gate;
using test::GateTransport;

class BlockQueueTest : public testing::Test {
 protected:
  [[nodiscard]] std::unique_ptr<BlockQueue> queue(Bytes block_bytes, unsigned depth) {
    return std::make_unique<BlockQueue>(
        "gate", QueueOptions{.block_bytes = block_bytes, .depth = depth},
        [this](unsigned) { return std::make_unique<GateTransport>(gate_); });
  }
  [[nodiscard]] Request request(Direction direction, Bytes offset, Bytes length,
                                std::function<void()> returned = {}) const {
    return {direction, &file_, offset, memory_.view(0, length), false, std::move(returned)};
  }

  test::TempDir directory_;
  File file_ = File::create_anonymous(directory_.path(), 1 * kMiB, File::Access::buffered);
  AlignedBytes memory_{1 * kMiB};
  Gate gate_;
};

TEST_F(BlockQueueTest, CutsARequestIntoBlocksOfAtMostTheGivenSize) {
  const auto queue = this->queue(100, 8);
  const Ticket ticket = queue->submit(request(Direction::write, 50, 250));
  const auto blocks = gate_.wait_for_starts(3);
  const std::vector<std::pair<Bytes, std::size_t>> expected = {{50, 100}, {150, 100}, {250, 50}};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(blocks[i].direction, Direction::write);
    EXPECT_EQ(blocks[i].descriptor, file_.descriptor());
    EXPECT_EQ(blocks[i].offset, expected[i].first);
    EXPECT_EQ(blocks[i].length, expected[i].second);
    EXPECT_EQ(blocks[i].data, memory_.view().data() + i * 100);
    gate_.finish(i);
  }
  EXPECT_TRUE(queue->wait(ticket).ok());
  EXPECT_EQ(gate_.starts().size(), 3U);
}

TEST_F(BlockQueueTest, StartsReadsBeforeQueuedWrites) {
  const auto queue = this->queue(100, 1);
  const Ticket first = queue->submit(request(Direction::write, 0, 200));
  gate_.wait_for_starts(1);
  const Ticket second = queue->submit(request(Direction::write, 1000, 100));
  const Ticket read = queue->submit(request(Direction::read, 2000, 100));
  for (std::size_t i = 0; i < 4; ++i) {
    gate_.wait_for_starts(i + 1);
    gate_.finish(i);
  }
  for (const Ticket ticket : {first, second, read}) EXPECT_TRUE(queue->wait(ticket).ok());
  std::vector<Bytes> order;
  for (const Block& block : gate_.starts()) order.push_back(block.offset);
  EXPECT_EQ(order, (std::vector<Bytes>{0, 2000, 100, 1000}));
}

TEST_F(BlockQueueTest, KeepsAtMostDepthBlocksInFlight) {
  const auto queue = this->queue(10, 3);
  const Ticket ticket = queue->submit(request(Direction::read, 0, 100));
  gate_.wait_for_starts(3);
  for (std::size_t i = 0; i < 10; ++i) {
    gate_.wait_for_starts(std::min<std::size_t>(i + 3, 10));
    EXPECT_LE(gate_.starts().size(), i + 3);
    gate_.finish(i);
  }
  EXPECT_TRUE(queue->wait(ticket).ok());
}

TEST_F(BlockQueueTest, KeepsTheFirstErrorAndStartsNoFurtherBlock) {
  const auto queue = this->queue(10, 2);
  const Ticket ticket = queue->submit(request(Direction::write, 0, 100));
  gate_.wait_for_starts(2);
  gate_.finish(1, -ENOSPC);
  const Ticket next = queue->submit(request(Direction::write, 500, 10));
  EXPECT_EQ(gate_.wait_for_starts(3)[2].offset, 500U);
  gate_.finish(0, -EIO);
  gate_.finish(2);
  const Completion completion = queue->wait(ticket);
  EXPECT_EQ(completion.error_number, ENOSPC);
  EXPECT_EQ(completion.transferred, 0U);
  EXPECT_TRUE(queue->wait(next).ok());
  EXPECT_EQ(gate_.starts().size(), 3U);
}

TEST_F(BlockQueueTest, HoldsTheMemoryUntilTheLastBlockIsBackEvenAfterAnError) {
  std::atomic<int> returned = 0;
  const auto queue = this->queue(10, 2);
  const Ticket ticket = queue->submit(request(Direction::read, 0, 20, [&] { ++returned; }));
  gate_.wait_for_starts(2);
  gate_.finish(0, -EIO);
  // Start number 2 shows that the owner thread has handled the failure.
  const Ticket next = queue->submit(request(Direction::read, 0, 10));
  gate_.wait_for_starts(3);
  EXPECT_EQ(returned, 0);
  gate_.finish(1);
  EXPECT_EQ(queue->wait(ticket).error_number, EIO);
  EXPECT_EQ(returned, 1);
  gate_.finish(2);
  EXPECT_TRUE(queue->wait(next).ok());
}

TEST_F(BlockQueueTest, ContinuesAShortBlockWhereItStopped) {
  const auto queue = this->queue(100, 1);
  const Ticket ticket = queue->submit(request(Direction::read, 1000, 100));
  gate_.wait_for_starts(1);
  gate_.finish(0, 30);
  const Block rest = gate_.wait_for_starts(2)[1];
  EXPECT_EQ(rest.offset, 1030U);
  EXPECT_EQ(rest.length, 70U);
  EXPECT_EQ(rest.data, memory_.view().data() + 30);
  gate_.finish(1);
  const Completion completion = queue->wait(ticket);
  EXPECT_TRUE(completion.ok());
  EXPECT_EQ(completion.transferred, 100U);
  EXPECT_EQ(queue->counters().continued, 1U);
  EXPECT_EQ(queue->counters().blocks, 1U);
}

TEST_F(BlockQueueTest, AZeroByteTransferIsAnErrorInsteadOfALoop) {
  const auto queue = this->queue(100, 1);
  const Ticket ticket = queue->submit(request(Direction::write, 0, 100));
  gate_.wait_for_starts(1);
  gate_.finish(0, 0);
  EXPECT_EQ(queue->wait(ticket).error_number, EIO);
}

TEST_F(BlockQueueTest, ATicketIsValidForOneWait) {
  const auto queue = this->queue(100, 1);
  EXPECT_THROW((void)queue->wait(Ticket{1}), Error);
  const Ticket ticket = queue->submit(request(Direction::write, 0, 10));
  gate_.wait_for_starts(1);
  gate_.finish(0);
  EXPECT_TRUE(queue->wait(ticket).ok());
  EXPECT_THROW((void)queue->wait(ticket), Error);
}

TEST_F(BlockQueueTest, OptionsOutOfRangeAreConfigErrors) {
  const auto category = [&](Bytes block_bytes, unsigned depth) {
    try {
      (void)queue(block_bytes, depth);
    } catch (const Error& error) {
      return to_string(error.category());
    }
    return std::string_view("accepted");
  };
  EXPECT_EQ(category(0, 4), "config");
  EXPECT_EQ(category(kMiB, 0), "config");
  EXPECT_EQ(category(kMiB, 1U << 20), "config");
}

TEST_F(BlockQueueTest, AFailureToMakeTheTransportReachesTheCaller) {
  const auto fail = [](unsigned) -> std::unique_ptr<Transport> {
    throw Error(ErrorCategory::io, "no such device");
  };
  EXPECT_THROW(BlockQueue("broken", {}, fail), Error);
}

TEST(Completion, NamesStageFileRangeAndReason) {
  Completion completion{.direction = Direction::read,
                        .error_number = EIO,
                        .transferred = 0,
                        .offset = 4096,
                        .length = 8192,
                        .file = "/disk"};
  const auto message = [&] {
    try {
      completion.check("fetch");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(), "fetch: read /disk offset=4096 length=8192: Input/output error");
  completion.error_number = 0;
  completion.transferred = 100;
  EXPECT_EQ(message(), "fetch: read /disk offset=4096 length=8192: only 100 bytes transferred");
  completion.transferred = 8192;
  EXPECT_EQ(message(), "");
}

}  // namespace
}  // namespace ballast::aio::block_queue_test
