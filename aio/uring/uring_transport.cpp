#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "aio/backends.h"
#include "aio/uring/ring.h"

namespace ballast::aio {
namespace {

/// Before the kernel is asked again for something that it was short of.
constexpr auto kPause = std::chrono::microseconds(100);
constexpr int kBrokenPollMilliseconds = 1;

/// A descriptor that makes a sleeping owner thread return: a poll on it stands in the ring.
class WakeEvent {
 public:
  WakeEvent() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (descriptor_ < 0) throw Error(ErrorCategory::io, "eventfd for the aio owner thread", errno);
  }
  ~WakeEvent() { close(descriptor_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Cannot fail but by a counter that is full, which wakes as well.
  void set() noexcept { eventfd_write(descriptor_, 1); }
  void clear() noexcept {
    eventfd_t ignored = 0;
    eventfd_read(descriptor_, &ignored);
  }

 private:
  int descriptor_;
};

class UringTransport final : public Transport {
 public:
  // One entry more than blocks, for the poll.
  explicit UringTransport(unsigned depth) : ring_(depth + 1) {
    // Spares the kernel a descriptor look-up per call; works as well without.
    io_uring_register_ring_fd(ring_.get());
    watch_wake();
  }

  void start(Block& block) override {
    if (broken_ != 0) return refuse(block);
    io_uring_sqe* sqe = next_entry();
    const auto length = static_cast<unsigned>(block.length);
    if (block.direction == Direction::read) {
      io_uring_prep_read(sqe, block.descriptor, block.data, length, block.offset);
    } else {
      io_uring_prep_write(sqe, block.descriptor, block.data, length, block.offset);
    }
    io_uring_sqe_set_data(sqe, &block);
    unsent_.push_back(&block);
  }

  void reap(std::vector<Block*>& finished, unsigned /*wanted*/,
            std::chrono::milliseconds /*patience*/) override {
    if (broken_ == 0) {
      submit_and_wait();
    } else if (refused_.empty()) {
      wait_without_ring();
    }
    collect(finished);
    finished.insert(finished.end(), refused_.begin(), refused_.end());
    refused_.clear();
  }

  void wake() noexcept override { wake_.set(); }

 private:
  /// There always is one: the ring has an entry for each block and the poll.
  io_uring_sqe* next_entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(ring_.get());
    expects(sqe != nullptr, "more blocks in flight than the aio queue's depth");
    return sqe;
  }

  void watch_wake() {
    io_uring_sqe* sqe = next_entry();
    io_uring_prep_poll_add(sqe, wake_.descriptor(), POLLIN);
    io_uring_sqe_set_data(sqe, nullptr);
    unsent_.push_back(nullptr);
  }

  void submit_and_wait() {
    const int sent = io_uring_submit_and_wait(ring_.get(), 1);
    if (sent >= 0) {
      unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
      return;
    }
    if (sent == -EINTR) return;
    if (sent == -EAGAIN || sent == -EBUSY || sent == -ENOMEM) {
      std::this_thread::sleep_for(kPause);
      return;
    }
    // The ring is of no use any more (a sandbox that closed, say): what the kernel has not seen
    // fails, what it has is waited for, because it may still write to the memory.
    broken_ = -sent;
    for (Block* block : unsent_) {
      if (block != nullptr) refuse(*block);
    }
    unsent_.clear();
  }

  void wait_without_ring() {
    pollfd wake{.fd = wake_.descriptor(), .events = POLLIN, .revents = 0};
    if (poll(&wake, 1, kBrokenPollMilliseconds) > 0) wake_.clear();
  }

  void collect(std::vector<Block*>& finished) {
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    unsigned seen = 0;
    bool woken = false;
    io_uring_for_each_cqe(ring_.get(), head, cqe) {
      ++seen;
      auto* block = static_cast<Block*>(io_uring_cqe_get_data(cqe));
      if (block == nullptr) {
        woken = true;
        if (cqe->res < 0) std::this_thread::sleep_for(kPause);
        continue;
      }
      block->result = cqe->res;
      finished.push_back(block);
    }
    io_uring_cq_advance(ring_.get(), seen);
    if (!woken) return;
    wake_.clear();
    if (broken_ == 0) watch_wake();
  }

  void refuse(Block& block) {
    block.result = -broken_;
    refused_.push_back(&block);
  }

  Ring ring_;
  WakeEvent wake_;
  /// What was handed to liburing but not yet to the kernel, in order; null for the poll.
  std::vector<Block*> unsent_;
  /// Blocks that a broken ring could not take, for the next reap().
  std::vector<Block*> refused_;
  /// errno that made the ring useless, or 0.
  int broken_ = 0;
};

}  // namespace

std::string probe_uring() {
  return Ring(4).description();
}

std::unique_ptr<Transport> make_uring_transport(unsigned depth) {
  return std::make_unique<UringTransport>(depth);
}

}  // namespace ballast::aio
