// Tests the order and number of the blocks that are started, and the effect of cancel().
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <random>
#include <thread>

#include "ballast/core/error.h"

#include "tests/unit/aio/gated_queue.h"

namespace ballast::aio::dispatch_test {
namespace {

class DispatchOrder : public GatedQueue {};

TEST_F(DispatchOrder, ReadsThatAreWaitedForThenReadsAheadThenWrites) {
  const auto queue = this->queue({.depth = 1});
  std::vector<Ticket> tickets;
  tickets.push_back(queue->submit(request(Direction::write, 0, 10)));
  gate_.wait_for_starts(1);
  tickets.push_back(queue->submit(request(Direction::write, 100, 10)));
  tickets.push_back(queue->submit(request(Direction::read, 200, 10, true)));
  tickets.push_back(queue->submit(request(Direction::read, 300, 10)));
  tickets.push_back(queue->submit(request(Direction::write, 400, 10)));
  tickets.push_back(queue->submit(request(Direction::read, 500, 10, true)));
  tickets.push_back(queue->submit(request(Direction::read, 600, 10)));
  EXPECT_EQ(finish_in_turn(7), (std::vector<Bytes>{0, 300, 600, 200, 500, 100, 400}));
  for (const Ticket ticket : tickets) EXPECT_TRUE(queue->wait(ticket).ok());
}

TEST_F(DispatchOrder, WaitingLiftsAReadAhead) {
  constexpr std::size_t kBlocks = 1000;
  const auto queue = this->queue({.block_bytes = 10, .depth = 1});
  const Ticket first = queue->submit(request(Direction::read, 0, kBlocks * 10, true));
  gate_.wait_for_starts(1);
  const Ticket second = queue->submit(request(Direction::read, 20'000, 10, true));
  const Ticket third = queue->submit(request(Direction::read, 30'000, 20, true));
  std::thread waiter([&] { EXPECT_TRUE(queue->wait(third).ok()); });
  // Finish blocks of the first request until the third request has overtaken its remaining blocks.
  std::size_t started = 1;
  while (gate_.starts().back().offset < 30'000 && started < kBlocks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    gate_.finish(started - 1);
    gate_.wait_for_starts(++started);
  }
  const auto offsets = finish_in_turn(kBlocks + 3, started - 1);
  waiter.join();
  EXPECT_TRUE(queue->wait(first).ok());
  EXPECT_TRUE(queue->wait(second).ok());
  EXPECT_LT(started, kBlocks);
  EXPECT_EQ(offsets[started - 1], 30'000U);
  EXPECT_EQ(offsets[started], 30'010U);
  EXPECT_EQ(offsets.back(), 20'000U);
}

TEST_F(DispatchOrder, WaitingForWritesOrFinishedReadsKeepsTheOrder) {
  const auto queue = this->queue({.depth = 1});
  const Ticket ahead = queue->submit(request(Direction::read, 0, 10, true));
  gate_.wait_for_starts(1);
  const Ticket write = queue->submit(request(Direction::write, 100, 10));
  std::thread waiter([&] { EXPECT_TRUE(queue->wait(write).ok()); });
  const Ticket read = queue->submit(request(Direction::read, 200, 10));
  EXPECT_EQ(finish_in_turn(3), (std::vector<Bytes>{0, 200, 100}));
  waiter.join();
  EXPECT_TRUE(queue->wait(ahead).ok());
  EXPECT_TRUE(queue->wait(read).ok());
}

/// Completes a random block at every reap and counts blocks and bytes in flight.
class RecordingTransport final : public Transport {
 public:
  struct Record {
    Bytes bytes = 0;
    Bytes most_bytes = 0;
    std::size_t blocks = 0;
    std::size_t most_blocks = 0;
  };
  explicit RecordingTransport(Record& record) : record_(record), inner_(gate_) {}

  void start(Block& block) override {
    record_.bytes += block.length;
    record_.blocks += 1;
    record_.most_bytes = std::max(record_.most_bytes, record_.bytes);
    record_.most_blocks = std::max(record_.most_blocks, record_.blocks);
    inner_.start(block);
    waiting_.push_back(started_++);
  }
  void reap(std::vector<Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override {
    if (!waiting_.empty()) {
      const std::size_t index = random_() % waiting_.size();
      const std::size_t chosen = waiting_[index];
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(index));
      const Block block = gate_.starts()[chosen];
      // Sometimes only half of the block is transferred, so the queue starts the rest again.
      const bool half = block.length > 1 && random_() % 4 == 0;
      gate_.finish(chosen, static_cast<long>(half ? block.length / 2 : block.length));
      record_.bytes -= block.length;
      record_.blocks -= 1;
    }
    inner_.reap(finished, wanted, patience);
  }
  void wake() noexcept override { inner_.wake(); }

 private:
  Record& record_;
  test::Gate gate_;
  test::GateTransport inner_;
  std::size_t started_ = 0;
  std::vector<std::size_t> waiting_;
  std::mt19937_64 random_{3};
};

TEST_F(DispatchOrder, NeverMoreBlocksOrBytesAreInFlightThanAllowed) {
  RecordingTransport::Record record;
  {
    BlockQueue queue("recording", {.block_bytes = 1000, .depth = 7, .in_flight_bytes = 4500},
                     [&](unsigned) { return std::make_unique<RecordingTransport>(record); });
    std::vector<Ticket> tickets;
    std::mt19937_64 random(5);
    for (int i = 0; i < 100; ++i) {
      const auto direction = random() % 2 == 0 ? Direction::read : Direction::write;
      tickets.push_back(queue.submit(request(direction, 0, 1 + random() % 5000)));
    }
    for (const Ticket ticket : tickets) EXPECT_TRUE(queue.wait(ticket).ok());
  }
  EXPECT_LE(record.most_bytes, 4500U);
  EXPECT_GT(record.most_bytes, 3500U);
  EXPECT_LE(record.most_blocks, 7U);
}

TEST_F(DispatchOrder, ABlockAboveTheByteLimitIsTransferredAlone) {
  RecordingTransport::Record record;
  {
    BlockQueue queue("recording", {.block_bytes = 1000, .depth = 7, .in_flight_bytes = 10},
                     [&](unsigned) { return std::make_unique<RecordingTransport>(record); });
    std::vector<Ticket> tickets;
    tickets.reserve(10);
    for (int i = 0; i < 10; ++i) tickets.push_back(queue.submit(request(Direction::read, 0, 2500)));
    for (const Ticket ticket : tickets) EXPECT_TRUE(queue.wait(ticket).ok());
  }
  EXPECT_EQ(record.most_blocks, 1U);
}

class Cancelling : public GatedQueue {};

TEST_F(Cancelling, EndsQueuedBlocksAndWaitsForThoseAtTheDevice) {
  std::atomic<int> released = 0;
  const auto queue = this->queue({.depth = 1});
  const auto count = [&] { ++released; };
  const Ticket moving = queue->submit(request(Direction::write, 0, 10, count));
  gate_.wait_for_starts(1);
  const Ticket write = queue->submit(request(Direction::write, 100, 10, count));
  const Ticket read = queue->submit(request(Direction::read, 200, 10, count));
  const Ticket ahead = queue->submit(request(Direction::read, 300, 10, true));
  queue->cancel();
  for (const Ticket ticket : {write, read, ahead}) {
    const Completion completion = queue->wait(ticket);
    EXPECT_EQ(completion.error_number, ECANCELED);
    EXPECT_EQ(completion.transferred, 0U);
    EXPECT_FALSE(completion.end_of_file);
  }
  EXPECT_EQ(released, 2);
  gate_.finish(0);
  EXPECT_TRUE(queue->wait(moving).ok());
  EXPECT_EQ(released, 3);
  EXPECT_EQ(gate_.starts().size(), 1U);
}

TEST_F(Cancelling, EndsTheRestOfARequestThatIsHalfDone) {
  std::atomic<int> released = 0;
  const auto queue = this->queue({.block_bytes = 10, .depth = 2});
  const Ticket ticket = queue->submit(request(Direction::read, 0, 50, [&] { ++released; }));
  gate_.wait_for_starts(2);
  queue->cancel();
  // When it ends, the owner thread has processed the cancellation.
  const Ticket late = queue->submit(request(Direction::read, 100, 10));
  EXPECT_EQ(queue->wait(late).error_number, ECANCELED);
  gate_.finish(0);
  gate_.finish(1, 4);  // the remaining part is not started again
  const Completion completion = queue->wait(ticket);
  EXPECT_EQ(completion.error_number, ECANCELED);
  EXPECT_EQ(completion.transferred, 14U);
  EXPECT_EQ(released, 1);
  EXPECT_EQ(gate_.starts().size(), 2U);
  try {
    completion.check("fetch");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "fetch: read " + file_.name() + " offset=0 length=50: cancelled");
  }
}

TEST_F(Cancelling, EndsLaterRequests) {
  std::atomic<int> released = 0;
  {
    const auto queue = this->queue({.depth = 4});
    queue->cancel();
    queue->cancel();
    const Ticket ticket = queue->submit(request(Direction::write, 0, 10, [&] { ++released; }));
    EXPECT_EQ(queue->wait(ticket).error_number, ECANCELED);
    EXPECT_EQ(released, 1);
    (void)queue->submit(request(Direction::write, 0, 10, [&] { ++released; }));
  }
  EXPECT_EQ(released, 2);
  EXPECT_TRUE(gate_.starts().empty());
}

TEST_F(Cancelling, WakesWaitingThreads) {
  const auto queue = this->queue({.depth = 1});
  const Ticket moving = queue->submit(request(Direction::write, 0, 10));
  gate_.wait_for_starts(1);
  const Ticket read = queue->submit(request(Direction::read, 100, 10));
  std::thread waiter([&] { EXPECT_EQ(queue->wait(read).error_number, ECANCELED); });
  queue->cancel();
  waiter.join();
  gate_.finish(0);
  EXPECT_TRUE(queue->wait(moving).ok());
}

}  // namespace
}  // namespace ballast::aio::dispatch_test
