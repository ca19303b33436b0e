#include "aio/faults/faulty_transport.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"

#include "tests/support/aligned_bytes.h"
#include "tests/support/gate_transport.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::faulty_transport_test {
namespace {

using test::AlignedBytes;
using test::Gate;
using test::GateTransport;

constexpr std::chrono::hours kLong(1);

/// Executes blocks at once, on the thread that starts them.
class PlainTransport final : public Transport {
 public:
  void start(Block& block) override {
    const auto position = static_cast<off_t>(block.offset);
    block.result = block.direction == Direction::read
                       ? pread(block.descriptor, block.data, block.length, position)
                       : pwrite(block.descriptor, block.data, block.length, position);
    done_.push_back(&block);
  }
  void reap(std::vector<Block*>& finished, unsigned /*wanted*/,
            std::chrono::milliseconds /*patience*/) override {
    finished.insert(finished.end(), done_.begin(), done_.end());
    done_.clear();
  }
  void wake() noexcept override {}

 private:
  std::vector<Block*> done_;
};

class FaultyTransportTest : public testing::Test {
 protected:
  static constexpr Bytes kSize = 4 * kPage;

  FaultyTransportTest() {
    const AlignedBytes before(kSize, 1);
    EXPECT_EQ(pwrite(file_.descriptor(), before.view().data(), kSize, 0), ssize_t{kSize});
    before_ = content();
  }

  [[nodiscard]] Block block(Direction direction, HostBytes bytes) const {
    return {.direction = direction,
            .descriptor = file_.descriptor(),
            .data = bytes.data(),
            .length = bytes.size()};
  }
  /// The result of one block with `faults`.
  [[nodiscard]] long carry(const std::string& faults, Direction direction, HostBytes bytes) const {
    FaultyTransport transport(std::make_unique<PlainTransport>(), FaultPlan(faults));
    Block block = this->block(direction, bytes);
    transport.start(block);
    std::vector<Block*> finished;
    transport.reap(finished, 1, kLong);
    EXPECT_EQ(finished, std::vector<Block*>{&block});
    return block.result;
  }
  [[nodiscard]] std::vector<std::byte> content() const {
    std::vector<std::byte> bytes(kSize);
    EXPECT_EQ(pread(file_.descriptor(), bytes.data(), kSize, 0), ssize_t{kSize});
    return bytes;
  }

  test::TempDir directory_;
  File file_ = File::create_anonymous(directory_.path(), kSize, File::Access::buffered);
  AlignedBytes memory_{kSize, 2};
  std::vector<std::byte> before_;
};

TEST_F(FaultyTransportTest, AFlipIsOneWrongBitInMemoryAndNoneInTheFile) {
  EXPECT_EQ(carry("flip", Direction::read, memory_.view()), long{kSize});
  int wrong = 0;
  for (std::size_t i = 0; i < kSize; ++i) {
    wrong += std::popcount(std::to_integer<unsigned>(memory_.view()[i] ^ before_[i]));
  }
  EXPECT_EQ(wrong, 1);
  EXPECT_TRUE(content() == before_);
}

TEST_F(FaultyTransportTest, ATornWriteWritesItsFirstHalf) {
  EXPECT_EQ(carry("torn", Direction::write, memory_.view()), long{kSize});
  const auto after = content();
  const auto half = static_cast<std::ptrdiff_t>(kSize / 2);
  EXPECT_TRUE(std::equal(after.begin(), after.begin() + half, memory_.view().begin()));
  EXPECT_TRUE(std::equal(after.begin() + half, after.end(), before_.begin() + half));
}

TEST_F(FaultyTransportTest, ALostWriteWritesNothing) {
  EXPECT_EQ(carry("lost", Direction::write, memory_.view()), long{kSize});
  EXPECT_EQ(carry("torn", Direction::write, memory_.view(0, kPage)), long{kPage});
  EXPECT_TRUE(content() == before_);
}

TEST_F(FaultyTransportTest, AShortTransferStopsAtItsReportedLength) {
  EXPECT_EQ(carry("short:bytes=5000", Direction::write, memory_.view()), 5000);
  const auto after = content();
  const auto carried = static_cast<std::ptrdiff_t>(2 * kPage);
  EXPECT_TRUE(std::equal(after.begin(), after.begin() + carried, memory_.view().begin()));
  EXPECT_TRUE(std::equal(after.begin() + carried, after.end(), before_.begin() + carried));
  EXPECT_EQ(carry("short:bytes=0", Direction::read, memory_.view()), 0);
}

TEST_F(FaultyTransportTest, ABlockThatFailsIsNotCarriedOut) {
  EXPECT_EQ(carry("enospc", Direction::write, memory_.view()), -ENOSPC);
  EXPECT_TRUE(content() == before_);
}

/// Starts and finishes blocks one by one and expects them back in the order of `expected`
/// (indices).
void expect_order(const std::string& faults, const std::vector<std::size_t>& expected) {
  Gate gate;
  FaultyTransport transport(std::make_unique<GateTransport>(gate), FaultPlan(faults));
  std::vector<Block> blocks(3);
  for (Block& block : blocks) {
    block.length = kPage;
    transport.start(block);
  }
  std::vector<Block*> finished;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    gate.finish(i);
    transport.reap(finished, 1, kLong);
  }
  std::vector<std::size_t> order;
  order.reserve(finished.size());
  for (const Block* block : finished) {
    order.push_back(static_cast<std::size_t>(block - blocks.data()));
  }
  EXPECT_EQ(order, expected) << faults;
}

TEST(FaultyTransport, ALateBlockComesBackAfterTheGivenNumberOfReaps) {
  expect_order("late:times=1", {1, 0, 2});
  expect_order("late:times=1:reaps=2", {1, 2, 0});
}

TEST(FaultyTransport, AReorderedBlockComesBackAfterALaterOne) {
  expect_order("reorder:times=1", {1, 0, 2});
  expect_order("reorder", {1, 0, 2});
}

TEST(FaultyTransport, AHungBlockNeitherComesBackNorSpins) {
  Gate gate;
  FaultyTransport transport(std::make_unique<GateTransport>(gate), FaultPlan("hang:times=1"));
  Block hung{.length = kPage};
  Block other{.length = kPage};
  transport.start(hung);
  std::vector<Block*> finished;
  // Nothing to reap: sleeps until the timeout or a wake().
  transport.reap(finished, 1, std::chrono::milliseconds(1));
  EXPECT_TRUE(finished.empty());
  std::thread waker([&] { transport.wake(); });
  transport.reap(finished, 1, kLong);
  waker.join();
  EXPECT_TRUE(finished.empty());
  EXPECT_TRUE(gate.starts().empty());

  transport.start(other);
  gate.finish(0);
  transport.reap(finished, 2, kLong);
  EXPECT_EQ(finished, std::vector<Block*>{&other});

  finished.clear();
  transport.end_hangs();
  transport.reap(finished, 1, kLong);
  EXPECT_EQ(gate.wait_for_starts(2).size(), 2U);
  gate.finish(1);
  while (finished.empty()) transport.reap(finished, 1, kLong);
  EXPECT_EQ(finished, std::vector<Block*>{&hung});
  EXPECT_EQ(hung.result, long{kPage});
}

TEST(FaultsFromTheEnvironment, ApplyToNewQueues) {
  const test::TempDir directory;
  const File file = File::create_anonymous(directory.path(), kMiB, File::Access::buffered);
  const AlignedBytes memory(64 * kKiB);
  std::string lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) lines += std::string(line) + "\n";
  });
  for (const std::string backend : {"auto", "threads"}) {
    lines.clear();
    setenv("BALLAST_IO_FAULTS", "enospc:after=1:times=1", 1);
    const auto queue = make_queue({.backend = backend});
    unsetenv("BALLAST_IO_FAULTS");
    EXPECT_EQ(lines, "aio: injecting faults: enospc:after=1:times=1\n");
    const auto write = [&] {
      return queue->wait(queue->submit({Direction::write, &file, 0, memory.view()}));
    };
    EXPECT_TRUE(write().ok());
    EXPECT_EQ(write().error_number, ENOSPC);
    EXPECT_TRUE(write().ok());
  }
  set_log_sink({});
}

TEST(FaultsFromTheEnvironment, AMistakeIsAConfigError) {
  setenv("BALLAST_IO_FAULTS", "hnag", 1);
  for (const std::string backend : {"auto", "threads"}) {
    try {
      (void)make_queue({.backend = backend});
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      EXPECT_EQ(std::string(error.what())
                    .rfind("environment variable BALLAST_IO_FAULTS: there is no fault 'hnag' (did "
                           "you mean 'hang'?)",
                           0),
                0U)
          << error.what();
    }
  }
  unsetenv("BALLAST_IO_FAULTS");
}

}  // namespace
}  // namespace ballast::aio::faulty_transport_test
