// Tests a device that answers slowly or never.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <thread>

#include "ballast/core/error.h"

#include "tests/support/captured_log.h"
#include "tests/unit/aio/gated_queue.h"

namespace ballast::aio::watchdog_test {
namespace {

class Watchdog : public GatedQueue {
 protected:
  /// Waits until `text` is in the log.
  void wait_for_line(const std::string& text) const {
    while (log_.text().find(text) == std::string::npos) std::this_thread::yield();
  }
  [[nodiscard]] std::ptrdiff_t warnings() const {
    const std::string text = log_.text();
    return std::ranges::count(text, '\n');
  }

  test::CapturedLog log_;
};

TEST_F(Watchdog, WarnsOncePerBlockAndNamesIt) {
  const auto queue = this->queue({.block_bytes = 20, .depth = 4, .stall_seconds = 0.05});
  const Ticket read = queue->submit(request(Direction::read, 100, 20));
  gate_.wait_for_starts(1);
  wait_for_line("aio: read " + file_.name() + " offset=100 length=20 has not completed after ");
  // When a second block causes a warning, the first could have caused another one.
  const Ticket write = queue->submit(request(Direction::write, 200, 30));
  gate_.wait_for_starts(3);
  wait_for_line("aio: write " + file_.name() + " offset=200 length=20 has not completed after ");
  wait_for_line("aio: write " + file_.name() + " offset=220 length=10 has not completed after ");
  for (std::size_t i = 0; i < 3; ++i) gate_.finish(i);
  const Completion completion = queue->wait(read);
  EXPECT_TRUE(completion.ok());
  EXPECT_GE(completion.seconds, 0.05);
  EXPECT_TRUE(queue->wait(write).ok());
  EXPECT_EQ(warnings(), 3) << log_.text();
  EXPECT_NE(log_.text().find(" has not completed after "), std::string::npos) << log_.text();
}

TEST_F(Watchdog, IsSilentIfTheDeviceAnswers) {
  {
    const auto queue = this->queue({.depth = 4, .stall_seconds = 3600, .abandon_seconds = 3600});
    const Ticket ticket = queue->submit(request(Direction::read, 0, 10));
    gate_.wait_for_starts(1);
    gate_.finish(0);
    EXPECT_TRUE(queue->wait(ticket).ok());
  }
  EXPECT_EQ(log_.text(), "");
}

class GivingUp : public Watchdog {
 protected:
  const QueueOptions impatient_ = {
      .block_bytes = 10, .depth = 2, .stall_seconds = 0.05, .abandon_seconds = 1};
};

TEST_F(GivingUp, FailsTheRequestButKeepsItsMemoryUntilTheBlockIsBack) {
  std::atomic<int> returned = 0;
  const auto queue = this->queue(impatient_);
  const Ticket ticket = queue->submit(request(Direction::read, 0, 10, [&] { ++returned; }));
  const Completion completion = queue->wait(ticket);
  EXPECT_EQ(completion.error_number, ETIMEDOUT);
  EXPECT_EQ(completion.transferred, 0U);
  EXPECT_GE(completion.seconds, 1);
  try {
    completion.check("fetch");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    const std::string expected =
        "fetch: read " + file_.name() + " offset=0 length=10: no answer from the device for ";
    EXPECT_EQ(std::string(error.what()).substr(0, expected.size()), expected);
  }
  // The queue still works, and has not returned the memory.
  const Ticket next = queue->submit(request(Direction::read, 100, 10));
  gate_.wait_for_starts(2);
  gate_.finish(1);
  EXPECT_TRUE(queue->wait(next).ok());
  EXPECT_EQ(returned, 0);
  gate_.finish(0);
  while (returned == 0) std::this_thread::yield();
  EXPECT_EQ(returned, 1);
}

TEST_F(GivingUp, KeepsTheMemoryUntilTheLastOfItsBlocksIsBack) {
  std::atomic<int> returned = 0;
  const auto queue = this->queue(impatient_);
  const Ticket ticket = queue->submit(request(Direction::write, 0, 40, [&] { ++returned; }));
  EXPECT_EQ(queue->wait(ticket).error_number, ETIMEDOUT);
  gate_.finish(1);
  // Another block takes its place, so the owner thread has processed it.
  const Ticket next = queue->submit(request(Direction::read, 100, 10));
  EXPECT_EQ(gate_.wait_for_starts(3)[2].offset, 100U);
  EXPECT_EQ(returned, 0);
  gate_.finish(0);
  gate_.finish(2);
  EXPECT_TRUE(queue->wait(next).ok());
  while (returned == 0) std::this_thread::yield();
}

TEST_F(GivingUp, AllowsDestroyingTheQueueAndKeepsTheMemory) {
  // The transport of such a queue is never freed, and neither are the objects that it refers to.
  auto* const gate = new test::Gate;
  std::atomic<int> returned = 0;
  std::atomic<int> others = 0;
  {
    BlockQueue queue("gate", impatient_,
                     [&](unsigned) { return std::make_unique<test::GateTransport>(*gate); });
    (void)queue.submit(request(Direction::write, 0, 20, [&] { ++returned; }));
    gate->wait_for_starts(2);
    // Gets no place at the device, neither before nor after the first request is abandoned.
    const Ticket queued = queue.submit(request(Direction::write, 100, 10, [&] { ++others; }));
    queue.cancel();
    EXPECT_EQ(queue.wait(queued).error_number, ECANCELED);
  }
  EXPECT_EQ(returned, 0);
  EXPECT_EQ(others, 1);
}

}  // namespace
}  // namespace ballast::aio::watchdog_test
