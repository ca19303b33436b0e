#include "ballast/state/swap_file.h"

#include <filesystem>
#include <functional>
#include <map>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

#include "tests/support/temp_dir.h"

namespace ballast::state {
namespace {

/// Page-aligned host memory.
class Memory {
 public:
  explicit Memory(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kPage}))),
        bytes_(bytes) {}
  ~Memory() { ::operator delete (data_, std::align_val_t{kPage}); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] HostBytes view() const { return {data_, bytes_}; }
  void fill(std::uint64_t seed) const {
    for (std::size_t i = 0; i < bytes_; ++i) {
      data_[i] = static_cast<std::byte>(random_u64(seed, i / 8) >> (i % 8 * 8));
    }
  }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ && std::equal(data_, data_ + bytes_, other.data_);
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

/// A queue that changes what passes through: the disk's faults.
class FaultyQueue final : public aio::Queue {
 public:
  /// `after_read` may change what a read brought.
  using Fault = std::function<void(HostBytes data, Bytes offset)>;
  /// Requests for which `drop` holds are reported as done without being carried out.
  using Drop = std::function<bool(const aio::Request&)>;

  explicit FaultyQueue(std::unique_ptr<aio::Queue> below) : below_(std::move(below)) {}

  aio::Ticket submit(aio::Request request) override {
    if (drop && drop(request)) {
      // A lost write: the old content stays, success is reported.
      request.direction = aio::Direction::read;
      shadow_.resize(request.lease.bytes().size() + kPage);
      auto* aligned = reinterpret_cast<std::byte*>(
          round_up(reinterpret_cast<std::uintptr_t>(shadow_.data()), kPage));
      request.lease = Lease(HostBytes(aligned, request.lease.bytes().size()));
      return below_->submit(std::move(request));
    }
    const HostBytes data = request.lease.bytes();
    const Bytes offset = request.offset;
    const bool read = request.direction == aio::Direction::read;
    const aio::Ticket ticket = below_->submit(std::move(request));
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
    const auto read = reads_.find(ticket.id);
    if (read != reads_.end() && after_read) after_read(read->second.first, read->second.second);
    return completion;
  }
  [[nodiscard]] std::string_view backend() const override { return below_->backend(); }
  [[nodiscard]] aio::QueueCounters counters() const override { return below_->counters(); }

  Fault after_read;
  Drop drop;

 private:
  std::unique_ptr<aio::Queue> below_;
  std::map<std::uint64_t, std::pair<HostBytes, Bytes>> reads_;
  std::vector<std::byte> shadow_;
};

class SwapFileTest : public testing::Test {
 protected:
  SwapFileTest() {
    auto queue = std::make_unique<FaultyQueue>(aio::make_queue({.backend = "threads"}));
    faults = queue.get();
    swap = std::make_unique<SwapFile>(aio::File::create_anonymous(directory.path(), 8 * kMiB),
                                      std::move(queue));
  }

  test::TempDir directory;
  FaultyQueue* faults = nullptr;
  std::unique_ptr<SwapFile> swap;
};

TEST_F(SwapFileTest, ExtentsKeepTheirOwnBytes) {
  const Extent first = swap->allocate(kMiB + 3 * kPage);
  const Extent second = swap->allocate(kPage);
  const Memory one(kMiB + 3 * kPage);
  const Memory two(kPage);
  one.fill(1);
  two.fill(2);
  swap->write(first, one.view(), 1);
  swap->write(second, two.view(), 1);
  const Memory back_one(kMiB + 3 * kPage);
  const Memory back_two(kPage);
  swap->read(first, back_one.view(), 1);
  swap->read(second, back_two.view(), 1);
  EXPECT_TRUE(back_one == one);
  EXPECT_TRUE(back_two == two);
  EXPECT_EQ(swap->allocated(), kMiB + 4 * kPage);
  EXPECT_EQ(swap->counters().bytes_written, kMiB + 4 * kPage);
}

TEST_F(SwapFileTest, OneFlippedBitIsFound) {
  const Extent extent = swap->allocate(3 * kMiB);
  const Memory memory(3 * kMiB);
  memory.fill(3);
  swap->write(extent, memory.view(), 1);
  faults->after_read = [](HostBytes data, Bytes offset) {
    if (offset == 2 * kMiB) data[12345] ^= std::byte{0x10};
  };
  try {
    swap->read(extent, memory.view(), 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::state);
    EXPECT_NE(std::string(error.what()).find("offset=2097152 length=1048576: checksum mismatch"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(SwapFileTest, ALostWriteIsFound) {
  const Extent extent = swap->allocate(2 * kMiB);
  const Memory memory(2 * kMiB);
  memory.fill(4);
  swap->write(extent, memory.view(), 1);
  faults->drop = [](const aio::Request& request) {
    return request.direction == aio::Direction::write && request.offset == kMiB;
  };
  memory.fill(5);
  swap->write(extent, memory.view(), 2);
  EXPECT_THROW(swap->read(extent, memory.view(), 2), Error);
}

TEST_F(SwapFileTest, AnotherVersionThanWantedIsRefused) {
  const Extent extent = swap->allocate(kPage);
  const Memory memory(kPage);
  memory.fill(6);
  EXPECT_THROW(swap->read(extent, memory.view(), 0), Error) << "never written";
  swap->write(extent, memory.view(), 7);
  EXPECT_THROW(swap->read(extent, memory.view(), 8), Error);
  EXPECT_NO_THROW(swap->read(extent, memory.view(), 7));
}

TEST_F(SwapFileTest, AllocatingPastTheEndIsRefused) {
  swap->allocate(8 * kMiB);
  EXPECT_THROW(swap->allocate(1), Error);
}

TEST_F(SwapFileTest, NothingIsEverVisibleInTheDirectory) {
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  swap.reset();
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace ballast::state
