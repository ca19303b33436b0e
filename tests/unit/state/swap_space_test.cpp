#include "ballast/state/swap_space.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/temp_dir.h"
#include "tests/unit/state/memory.h"

namespace ballast::state::swap_space_test {
namespace {

using test::Memory;
using test::TempDir;

/// A queue that changes the data of its requests, like a faulty disk.
class FaultyQueue final : public aio::Queue {
 public:
  /// `after_read` may change the data of a read.
  using Fault = std::function<void(HostBytes data, Bytes offset)>;
  /// Requests for which `drop` is true are reported as done without being carried out.
  using Drop = std::function<bool(const aio::Request&)>;

  explicit FaultyQueue(std::unique_ptr<aio::Queue> below) : below_(std::move(below)) {}

  aio::Ticket submit(aio::Request request) override {
    if (drop && drop(request)) {
      // A lost write: the old content remains, success is reported.
      request.direction = aio::Direction::read;
      shadow_.resize(request.memory.size() + kPage);
      auto* aligned = reinterpret_cast<std::byte*>(
          round_up(reinterpret_cast<std::uintptr_t>(shadow_.data()), kPage));
      request.memory = HostBytes(aligned, request.memory.size());
      return below_->submit(std::move(request));
    }
    const HostBytes data = request.memory;
    const Bytes offset = request.offset;
    const bool read = request.direction == aio::Direction::read;
    const aio::Ticket ticket = below_->submit(std::move(request));
    const std::lock_guard lock(mutex_);
    if (read) reads_[ticket.id] = {data, offset};
    return ticket;
  }
  std::vector<aio::Ticket> submit(std::span<aio::Request> requests) override {
    std::vector<aio::Ticket> tickets;
    for (aio::Request& request : requests) tickets.push_back(submit(std::move(request)));
    return tickets;
  }
  void cancel() override { below_->cancel(); }
  aio::Completion wait(aio::Ticket ticket) override {
    aio::Completion completion = below_->wait(ticket);
    const std::lock_guard lock(mutex_);
    const auto read = reads_.find(ticket.id);
    if (read != reads_.end() && after_read) after_read(read->second.first, read->second.second);
    if (after_wait) after_wait(completion);
    return completion;
  }
  [[nodiscard]] std::string_view backend() const override { return below_->backend(); }
  [[nodiscard]] aio::QueueCounters counters() const override { return below_->counters(); }

  Fault after_read;
  std::function<void(aio::Completion&)> after_wait;
  Drop drop;

 private:
  std::unique_ptr<aio::Queue> below_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::pair<HostBytes, Bytes>> reads_;
  std::vector<std::byte> shadow_;
};

/// Extents over two paths; the second gets two segments of three.
class SwapSpaceTest : public testing::Test {
 protected:
  SwapSpaceTest() {
    const std::vector<double> weights = {1.0, 2.0};
    Stripe stripe(extents, weights, kChunk);
    std::vector<std::unique_ptr<SwapDevice>> devices;
    for (std::size_t p = 0; p < 2; ++p) {
      auto queue = std::make_unique<FaultyQueue>(aio::make_queue({.backend = "threads"}));
      faults.push_back(queue.get());
      devices.push_back(std::make_unique<SwapDevice>(
          SwapDevice{aio::File::create_anonymous(directories[p].path(), stripe.file_bytes(p),
                                                 aio::File::Access::buffered),
                     std::move(queue)}));
    }
    swap = std::make_unique<SwapSpace>(std::move(stripe), std::move(devices));
  }

  void write(std::size_t extent, std::uint64_t seed, std::uint64_t version) const {
    const Memory memory(extents[extent]);
    memory.fill(seed);
    swap->write(extent, memory.view(), version)->finish();
  }
  void expect(std::size_t extent, std::uint64_t seed, std::uint64_t version) const {
    const Memory wanted(extents[extent]);
    wanted.fill(seed);
    const Memory found(extents[extent]);
    swap->read(extent, found.view(), version)->finish();
    EXPECT_TRUE(found == wanted);
  }
  std::string failure(std::size_t extent, std::uint64_t version, ErrorCategory category) const {
    const Memory memory(extents[extent]);
    try {
      swap->read(extent, memory.view(), version)->finish();
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), category) << error.what();
      return error.what();
    }
    return "";
  }
  /// The segment of `extent` with number `number`.
  [[nodiscard]] const Segment& segment(std::size_t extent, std::size_t number) const {
    return swap->stripe().segments(extent)[number];
  }

  const std::vector<Bytes> extents = {6 * kMiB + 3 * kPage, kPage, 3 * kMiB};
  std::vector<TempDir> directories{2};
  std::vector<FaultyQueue*> faults;
  std::unique_ptr<SwapSpace> swap;
};

TEST_F(SwapSpaceTest, ExtentsKeepTheirOwnBytesAndVersions) {
  for (std::size_t e = 0; e < 3; ++e) write(e, e, 1);
  for (std::size_t e = 0; e < 3; ++e) expect(e, e, 1);
  write(1, 7, 2);
  expect(0, 0, 1);
  expect(1, 7, 2);
  expect(2, 2, 1);
}

TEST_F(SwapSpaceTest, CountsTheBytesOfEachPath) {
  for (std::size_t e = 0; e < 3; ++e) write(e, e, 1);
  const auto counters = swap->counters();
  ASSERT_EQ(counters.size(), 2U);
  for (std::size_t p = 0; p < 2; ++p) {
    EXPECT_EQ(counters[p].bytes_written, swap->stripe().file_bytes(p));
  }
  EXPECT_EQ(swap->stripe().bytes(), 9 * kMiB + 4 * kPage);
  EXPECT_EQ(swap->backend(), "threads");
}

TEST_F(SwapSpaceTest, AFirstWriteOfZerosMovesNothing) {
  const auto bytes_written = [&] {
    Bytes sum = 0;
    for (const auto& counters : swap->counters()) sum += counters.bytes_written;
    return sum;
  };
  const auto zeros = [](Bytes size) {
    auto memory = std::make_unique<Memory>(size);
    std::fill(memory->view().begin(), memory->view().end(), std::byte{0});
    return memory;
  };
  const auto expect_zeros = [&](std::uint64_t version, Bytes used) {
    auto wanted = zeros(extents[0]);
    if (used > 0) wanted->view()[used - 1] = std::byte{1};
    const Memory found(extents[0]);
    swap->read(0, found.view(), version)->finish();
    EXPECT_TRUE(found == *wanted);
  };
  const auto first = zeros(extents[0]);
  swap->write(0, first->view(), 1, 0)->finish();
  EXPECT_EQ(bytes_written(), 0U);
  expect_zeros(1, 0);
  // Writes only the segments up to the last byte that differs.
  const Bytes used = segment(0, 1).start + segment(0, 1).bytes;
  first->view()[used - 1] = std::byte{1};
  swap->write(0, first->view(), 2, used)->finish();
  EXPECT_EQ(bytes_written(), used);
  expect_zeros(2, used);
  // Zeros that replace other bytes are written. The last segment is still new.
  swap->write(0, zeros(extents[0])->view(), 3, 0)->finish();
  EXPECT_EQ(bytes_written(), 2 * used);
  expect_zeros(3, 0);
}

TEST_F(SwapSpaceTest, ZerosAfterAFailedWriteAreWritten) {
  write(1, 5, 1);
  faults[segment(1, 0).path]->after_wait = [](aio::Completion& done) { done.error_number = EIO; };
  EXPECT_THROW(write(1, 6, 2), Error);
  faults[segment(1, 0).path]->after_wait = nullptr;
  const Memory zeros(extents[1]);
  std::fill(zeros.view().begin(), zeros.view().end(), std::byte{0});
  swap->write(1, zeros.view(), 3, 0)->finish();
  const Memory found(extents[1]);
  swap->read(1, found.view(), 3)->finish();
  EXPECT_TRUE(found == zeros);
}

TEST_F(SwapSpaceTest, TheFirstWriteOfAllExtentsTakesAllOfTheFilesIntoUse) {
  const SwapPlan plan =
      plan_swap({.paths = {{.directory = directories[0].path(), .io = {.backend = "threads"}},
                           {.directory = directories[1].path(), .io = {.backend = "threads"}}},
                 .access = aio::File::Access::buffered,
                 .any_file_system = true},
                extents);
  SwapSpace space(plan, {});
  for (std::size_t e = 0; e < extents.size(); ++e) {
    const Memory memory(extents[e]);
    memory.fill(e);
    space.write(e, memory.view(), 1)->finish();
  }
  const auto counters = space.counters();
  for (std::size_t p = 0; p < 2; ++p) {
    EXPECT_EQ(counters[p].bytes_written, plan.stripe.file_bytes(p));
  }
}

TEST_F(SwapSpaceTest, OneFlippedBitIsFoundAndLocated) {
  write(0, 3, 1);
  const Segment& second = segment(0, 1);
  faults[second.path]->after_read = [&](HostBytes data, Bytes offset) {
    if (offset == second.offset) data[12345] ^= std::byte{0x10};
  };
  const std::string text = failure(0, 1, ErrorCategory::state);
  const std::string place = directories[second.path].path().string() +
                            " offset=" + std::to_string(second.offset) + " length=1048576";
  EXPECT_EQ(text, "fetch: read " + place +
                      ": checksum mismatch: the disk returned different bytes than were written; "
                      "check the drive");
}

TEST_F(SwapSpaceTest, ALostWriteIsFound) {
  write(2, 4, 1);
  const Segment& last = segment(2, 2);
  faults[last.path]->drop = [&](const aio::Request& request) {
    return request.direction == aio::Direction::write && request.offset == last.offset;
  };
  write(2, 5, 2);
  EXPECT_NE(failure(2, 2, ErrorCategory::state).find("checksum mismatch"), std::string::npos);
}

TEST_F(SwapSpaceTest, AnUnexpectedVersionIsRefused) {
  EXPECT_NE(failure(1, 0, ErrorCategory::state).find("holds version none, expected version 0"),
            std::string::npos);
  write(1, 6, 7);
  EXPECT_NE(failure(1, 8, ErrorCategory::state).find("holds version 7, expected version 8"),
            std::string::npos);
  expect(1, 6, 7);
}

TEST_F(SwapSpaceTest, AFailedTransferIsReportedAfterAllHaveEnded) {
  write(0, 3, 1);
  int waited = 0;
  for (FaultyQueue* queue : faults) {
    queue->after_wait = [&](aio::Completion& completion) {
      ++waited;
      if (completion.offset == kMiB) completion.error_number = EIO;
    };
  }
  const std::string text = failure(0, 1, ErrorCategory::io);
  EXPECT_EQ(text.rfind("fetch: read ", 0), 0U) << text;
  EXPECT_NE(text.find(" offset=1048576 length="), std::string::npos) << text;
  EXPECT_EQ(waited, 7);
  waited = 0;
  const Memory memory(extents[0]);
  EXPECT_THROW(swap->write(0, memory.view(), 2)->finish(), Error);
  EXPECT_EQ(waited, 7);
}

TEST_F(SwapSpaceTest, ASubmitThatThrowsLeavesNoTransferBehind) {
  int submitted = 0;
  int waited = 0;
  for (FaultyQueue* queue : faults) {
    queue->after_wait = [&](aio::Completion&) { ++waited; };
    queue->drop = [&](const aio::Request&) -> bool {
      if (++submitted == 3) throw Error(ErrorCategory::state, "no");
      return false;
    };
  }
  const Memory memory(extents[2]);
  memory.fill(9);
  EXPECT_THROW(swap->write(2, memory.view(), 1)->finish(), Error);
  EXPECT_EQ(submitted, 3);
  EXPECT_EQ(waited, 2);
}

TEST_F(SwapSpaceTest, AnotherSizeThanTheExtentsIsAStateError) {
  const Memory memory(2 * kMiB);
  EXPECT_THROW(swap->write(2, memory.view(), 1)->finish(), Error);
  EXPECT_THROW(swap->read(0, memory.view(), 1)->finish(), Error);
}

TEST_F(SwapSpaceTest, SeveralThreadsMayUseSeveralExtents) {
  for (std::size_t e = 0; e < 3; ++e) write(e, e, 0);
  std::vector<std::thread> threads;
  for (std::size_t e = 0; e < 3; ++e) {
    threads.emplace_back([this, e] {
      for (std::uint64_t version = 1; version < 6; ++version) {
        write(e, e * 100 + version, version);
        expect(e, e * 100 + version, version);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(SwapSpaceTest, OnlyMarkedReadsArePrefetches) {
  write(2, 1, 1);
  int ahead = 0;
  int others = 0;
  for (FaultyQueue* queue : faults) {
    queue->drop = [&](const aio::Request& request) {
      ++(request.ahead ? ahead : others);
      return false;
    };
  }
  const Memory memory(extents[2]);
  swap->read(2, memory.view(), 1, true)->finish();
  EXPECT_EQ(ahead, 3);
  swap->read(2, memory.view(), 1)->finish();
  swap->write(2, memory.view(), 2)->finish();
  EXPECT_EQ(ahead, 3);
  EXPECT_EQ(others, 6);
}

TEST_F(SwapSpaceTest, NothingIsEverVisibleInTheDirectories) {
  for (const TempDir& directory : directories) {
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
  swap.reset();
  for (const TempDir& directory : directories) {
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
}

}  // namespace
}  // namespace ballast::state::swap_space_test
