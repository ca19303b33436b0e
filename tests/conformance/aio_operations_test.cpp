// Random operations on a queue, compared with a model of the file in memory: 40,000 for each
// variant, or BALLAST_TEST_OPERATIONS (a million in the benchmark of the same name).
#include <array>
#include <cstdlib>
#include <cstring>
#include <random>

#include <unistd.h>

#include "tests/conformance/aio_variants.h"
#include "tests/support/sanitizers.h"

namespace ballast::aio::aio_operations_test {
namespace {

constexpr unsigned kOperations = test::kSanitized ? 10'000 : 40'000;
constexpr std::size_t kGranules = 1024;
constexpr std::size_t kLongest = 4;  // granules of one request
constexpr std::size_t kSlots = 48;   // requests in flight
constexpr std::size_t kLongestSpan = 16;
constexpr std::size_t kNobody = kSlots;

unsigned operations() {
  const char* text = std::getenv("BALLAST_TEST_OPERATIONS");
  return text == nullptr ? kOperations : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

/// The file, its expected content, and the requests in flight, whose ranges do not overlap.
class Operations {
 public:
  Operations(Queue& queue, const File& file, HostBytes arena, std::uint64_t seed)
      : queue_(queue), file_(file), granule_(file.size() / kGranules), random_(seed) {
    owner_.fill(kNobody);
    for (std::size_t i = 0; i < kSlots; ++i) {
      slots_[i].memory = arena.subspan(i * kLongest * granule_, kLongest * granule_);
      free_.push_back(i);
    }
  }

  /// Adds one random operation, which is submitted with its batch. First finishes operations that
  /// overlap it.
  void add() {
    if (free_.empty()) finish(some_in_flight());
    const std::size_t first = random_() % kGranules;
    const std::size_t count = std::min(1 + random_() % kLongest, kGranules - first);
    for (std::size_t i = first; i < first + count; ++i) {
      if (owner_[i] != kNobody) finish(owner_[i]);
    }
    const std::size_t index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[index];
    slot.direction = random_() % 2 == 0 ? Direction::read : Direction::write;
    slot.first = first;
    slot.count = count;
    slot.returned = 0;
    std::fill_n(owner_.begin() + static_cast<std::ptrdiff_t>(first), count, index);
    const HostBytes bytes = slot.memory.first(count * granule_);
    if (slot.direction == Direction::write) {
      fill(bytes);
      std::ranges::copy(bytes, in_model(slot).begin());
      written_ += bytes.size();
    } else {
      read_ += bytes.size();
    }
    batch_.push_back({slot.direction, &file_, first * granule_, bytes, random_() % 4 == 0,
                      [&slot] { ++slot.returned; }});
    in_batch_.push_back(index);
    if (batch_.size() >= span_) submit();
  }

  void finish_all() {
    submit();
    while (free_.size() < kSlots && !testing::Test::HasFailure()) finish(some_in_flight());
  }

  [[nodiscard]] const std::vector<std::byte>& model() const { return model_; }
  [[nodiscard]] Bytes bytes_read() const { return read_; }
  [[nodiscard]] Bytes bytes_written() const { return written_; }

 private:
  struct Slot {
    Direction direction = Direction::read;
    std::size_t first = 0;
    std::size_t count = 0;
    HostBytes memory;
    Ticket ticket;
    int returned = 0;  // not atomic: wait() must order the threads
  };

  void submit() {
    if (batch_.empty()) return;
    if (batch_.size() == 1) {
      slots_[in_batch_.front()].ticket = queue_.submit(std::move(batch_.front()));
    } else {
      const auto tickets = queue_.submit(std::span<Request>(batch_));
      for (std::size_t i = 0; i < tickets.size(); ++i) slots_[in_batch_[i]].ticket = tickets[i];
    }
    batch_.clear();
    in_batch_.clear();
    span_ = 1 + random_() % kLongestSpan;
  }

  std::size_t some_in_flight() {
    std::size_t index = random_() % kSlots;
    while (std::ranges::find(free_, index) != free_.end()) index = (index + 1) % kSlots;
    return index;
  }

  void finish(std::size_t index) {
    if (std::ranges::find(in_batch_, index) != in_batch_.end()) submit();
    Slot& slot = slots_[index];
    const Completion completion = queue_.wait(slot.ticket);
    std::fill_n(owner_.begin() + static_cast<std::ptrdiff_t>(slot.first), slot.count, kNobody);
    free_.push_back(index);
    EXPECT_TRUE(completion.ok()) << completion.error_number;
    EXPECT_EQ(slot.returned, 1);
    if (slot.direction == Direction::write) return;
    const std::span<std::byte> expected = in_model(slot);
    EXPECT_EQ(std::memcmp(slot.memory.data(), expected.data(), expected.size()), 0)
        << "offset " << completion.offset << " length " << completion.length;
  }

  void fill(HostBytes bytes) {
    std::uint64_t word = random_();
    for (std::size_t i = 0; i < bytes.size(); i += sizeof word) {
      word = word * 6364136223846793005U + 1442695040888963407U;
      std::memcpy(bytes.data() + i, &word, sizeof word);
    }
  }

  std::span<std::byte> in_model(const Slot& slot) {
    return std::span(model_).subspan(slot.first * granule_, slot.count * granule_);
  }

  Queue& queue_;
  const File& file_;
  const Bytes granule_;
  std::mt19937_64 random_;
  std::vector<std::byte> model_ = std::vector<std::byte>(file_.size());
  std::array<std::size_t, kGranules> owner_{};
  std::array<Slot, kSlots> slots_;
  std::vector<std::size_t> free_;
  std::vector<Request> batch_;
  std::vector<std::size_t> in_batch_;
  std::size_t span_ = 1;
  Bytes read_ = 0;
  Bytes written_ = 0;
};

class AioOperations : public AioQueue {};

TEST_P(AioOperations, AgreeWithAModelOfTheFile) {
  const File& file = this->file(kGranules * kPage);
  const HostBytes arena = memory(kSlots * kLongest * kPage);
  const auto queue = this->queue(2 * kPage, 32);
  Operations operations(*queue, file, arena, 11);
  const unsigned count = aio_operations_test::operations();
  for (unsigned i = 0; i < count && !HasFailure(); ++i) operations.add();
  operations.finish_all();

  std::vector<std::byte> whole(file.size());
  const File again = File::open("/proc/self/fd/" + std::to_string(file.descriptor()), false,
                                File::Access::buffered);
  ASSERT_EQ(pread(again.descriptor(), whole.data(), whole.size(), 0), std::ssize(whole));
  EXPECT_TRUE(whole == operations.model());
  EXPECT_EQ(queue->counters().bytes_read, operations.bytes_read());
  EXPECT_EQ(queue->counters().bytes_written, operations.bytes_written());
}

INSTANTIATE_TEST_SUITE_P(Variants, AioOperations, testing::ValuesIn(all_variants()), name_of);

}  // namespace
}  // namespace ballast::aio::aio_operations_test
